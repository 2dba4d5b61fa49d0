"""Workers that hold stages of a model, each in a process of its own."""

import multiprocessing
import os
import signal
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from computeshare.jobspec.spec import JobSpec
from computeshare.protocol.keys import JobKeys
from computeshare.protocol.round_store import RoundStore
from computeshare.protocol.scripts import Scripts
from computeshare.protocol.worker_session import WorkerSession
from computeshare.settings import Settings
from computeshare.tasks.modules import drawn_from
from computeshare.transport.connections import connect
from computeshare.transport.wire import Wires
from tests.support.rounds import take_seat

PRELOADED = ["tests.support.stage_seats", "computeshare.worker.stages.stage_loop"]
"""What takes long to import, so that a fork server does it once."""
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(PRELOADED)


def hold(url: str, job_id: str, worker: str, data: Path | None, build: Callable[[], nn.Module] | None) -> None:
    """Take part in a job until SIGTERM or its end, as a seat does."""
    import torch

    from computeshare.tasks.images.classification import ImageClassification
    from computeshare.worker.seat.lease_keeper import LeaseKeeper
    from computeshare.worker.seat.seat_loop import SeatStatus
    from computeshare.worker.seat.seat_setup import SeatMemory
    from computeshare.worker.stages.stage_loop import StageLoop, StageSeat, join_members
    from computeshare.worker.stages.stage_setup import await_stages, open_stages

    torch.set_num_threads(1)
    if build:
        ImageClassification.module = drawn(build)  # type: ignore[method-assign]
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    redis = connect(url)
    rounds = RoundStore(redis, job_id)
    plan, spec = await_stages(rounds, stop), rounds.spec()
    assert plan and spec
    setup = open_stages(JobSpec.model_validate_json(spec), "cpu", Settings(data=data), plan)
    memory = SeatMemory(setup.spec, setup.memory, 0)
    session = WorkerSession(redis, job_id, worker, uuid.uuid4().hex)
    take_seat(session)
    keeper, wires, mail = LeaseKeeper(session), Wires.to(redis), Wires.to(redis)
    with keeper, join_members(redis, session, setup, memory, stop) as membership:
        seat = StageSeat(redis, session, keeper, setup, membership, memory, SeatStatus(), wires, mail, stop)
        StageLoop(seat).run()
    session.leave("left")


def drawn(build: Callable[[], nn.Module]) -> Callable[[Any, int], nn.Module]:
    """A method `module` of tasks: a module drawn from the seed."""

    def module(_: Any, seed: int) -> nn.Module:
        with drawn_from(seed):
            return build()

    return module


class Seat:
    """A worker's seat in a process."""

    def __init__(
        self,
        url: str,
        job_id: str,
        worker: str,
        data: Path | None = None,
        build: Callable[[], nn.Module] | None = None,
    ) -> None:
        """`data`: the folder of data sets; `build`: makes the model, in place of the job's image classifier."""
        self._url, self.job_id, self.worker = url, job_id, worker
        self._process: Any = PROCESSES.Process(target=hold, args=(url, job_id, worker, data, build), daemon=True)
        self._process.start()

    @property
    def is_alive(self) -> bool:
        alive: bool = self._process.is_alive()
        return alive

    def leave(self) -> None:
        if self.is_alive:
            self._process.terminate()
            self._process.join(20)

    def suspect(self) -> None:
        """Have the broker take it for dead, as if it had been silent for long: its leases are freed, its stages given
        to others.
        """
        redis = connect(self._url)
        keys = JobKeys(self.job_id)
        session = redis.hget(keys.sessions(), self.worker) or b""
        redis.hdel(keys.members(), self.worker)
        Scripts(redis).call("release", keys, session=session)

    def die(self) -> None:
        """End without a word to the others."""
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join(20)
