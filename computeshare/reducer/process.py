"""The reducer process: averages a round's updates and commits the next version.

Any number of them may run, and each may serve several jobs. Each job has one active reducer, by a claim that expires;
another takes over from what lies in Redis, or, if Redis came back empty, from the last checkpoint on disk.
"""

import contextlib
import os
import random
import threading
import time
import traceback
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import structlog
import typer
from redis import Redis
from redis.exceptions import RedisError

from computeshare.checkpoints.store import Artifacts
from computeshare.errors import ComputeShareError, DamagedRound, LostClaim
from computeshare.jobspec.optimizer_spec import OptimizerSpec
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol import handshake
from computeshare.protocol.job_log import JobLog
from computeshare.protocol.keys import GIVEN_UP, JobKeys
from computeshare.protocol.reducer_session import Claim
from computeshare.protocol.round_store import published_jobs
from computeshare.reducer.job_reducer import JobReducer
from computeshare.runtime.log_lines import REMARK_EVERY_S, Seldom, Writer
from computeshare.runtime.processes import (
    configure_logging,
    end_soon_after,
    exit_with_parent,
    hostname,
    spare_the_collector,
    stop_event,
)
from computeshare.settings import Settings
from computeshare.tensors.layout import Layout
from computeshare.terminal.command import run_command
from computeshare.transport.connections import by_loopback, connect
from computeshare.transport.wire import Wires

CLAIM_MS = 2000
RENEW_S = 0.5
LOOK_S = 0.25
"""How often a reducer looks for new jobs, and for claims that were given up."""
STAND_BACK_S, LONGEST_STAND_BACK_S = 0.05, 0.5
"""How much longer a reducer leaves a job to others with each job that it serves, and the most."""
OUTAGE_S = (0.5, 1.5)
"""Between these, at random, the broker is tried again after an outage."""
SETTLED_LOOK_S = 1.0
"""How often it looks at a job of which nothing is left to do."""

log = structlog.get_logger()


class JobThread:
    """Serves one job, so that no job waits for another's step.

    It ends when nothing is left to do, when the claim is lost, or with `stop`.
    """

    def __init__(self, rounds: Claim, artifacts: Path, stop: threading.Event) -> None:
        self.rounds, self.stop = rounds, stop
        self.job = JobReducer(rounds, artifacts)
        self.holds_claim = True
        """Whether the claim is to be renewed."""
        self._remarks = Seldom(REMARK_EVERY_S)
        self._thread = threading.Thread(target=self._run, name=f"job {rounds.job_id}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def lose(self) -> None:
        """End soon: another may have taken over, or the broker has lost the claim."""
        if self.holds_claim:
            log.warning("lost claim", job=self.rounds.job_id, reason="it ran out")
        self.holds_claim = False

    def _run(self) -> None:
        self.holds_claim = self._serve() and self.holds_claim
        self.job.close()  # which finishes the checkpoint that is being written, and tells of it under this claim
        if self.holds_claim:
            self._give_up()

    def _serve(self) -> bool:
        """Let the job advance until that is over; an outage of the broker is waited out.

        Returns False where it is not known what was committed: whoever claims the job, once this claim has run out,
        starts again from what Redis holds.
        """
        patience_s = 0.0  # a job that was just claimed has waited
        while self.holds_claim and not self.stop.is_set():
            try:
                if not self._advance(patience_s):
                    return True
            except RedisError as error:
                tell_outage(self._remarks, error)
                if not self.job.is_looking:
                    return False
                self.stop.wait(random.uniform(*OUTAGE_S))
            patience_s = min(LOOK_S, self.job.look_again_s)
        return True

    def _advance(self, patience_s: float) -> bool:
        """Let the job advance; False once that is over. Whatever goes wrong with it is that job's affair alone."""
        job, job_id = self.job, self.rounds.job_id
        try:
            if job.is_held:
                self.stop.wait(LOOK_S)
            return job.advance(patience_s)
        except LostClaim as lost:
            log.warning("lost claim", job=job_id, reason=str(lost))
        except RedisError:
            raise
        except ComputeShareError as error:
            log.error("job failed", job=job_id, error=str(error))
            job.fail(str(error), traceback.format_exc())
        except Exception as error:
            log.exception("job failed", job=job_id)
            job.fail(f"{type(error).__name__}: {error}", traceback.format_exc())
        return False

    def _give_up(self) -> None:
        """Let another reducer claim the job at once; where the broker is away, the claim runs out by itself."""
        self.holds_claim = False
        with contextlib.suppress(RedisError):
            self.rounds.renew(0)
            self.rounds.redis.incr(GIVEN_UP)


class Reducer:
    """Claims the jobs that have no reducer, and keeps the claims; each job is served by a thread of its own."""

    def __init__(self, redis: Redis, artifacts: Path, stop: threading.Event) -> None:
        self.redis, self.artifacts, self.stop = redis, artifacts, stop
        self.id = uuid.uuid4().hex[:12]
        self.jobs: dict[str, JobThread] = {}
        self._near: Redis | None = None
        self._asleep: dict[str, float] = {}
        """Job to the moment when it may need a reducer: another's claim may have ended by then."""
        self._free_since: dict[str, float] = {}
        """Job to the moment when it was first seen without a reducer."""
        self._given_up: bytes | None = None
        """How many claims had been given up when it looked the last time."""
        self._remarks = Seldom(REMARK_EVERY_S)

    def run(self) -> None:
        """Serve until told to stop; an outage of the broker is waited out."""
        over = threading.Event()
        keeper = threading.Thread(target=self._keep_claims, args=(over,), name="claims", daemon=True)
        keeper.start()
        try:
            while not self.stop.is_set():
                try:
                    self.claim_jobs()
                    self.stop.wait(LOOK_S)
                except RedisError as error:
                    tell_outage(self._remarks, error)
                    self.stop.wait(random.uniform(*OUTAGE_S))
            for job in self.jobs.values():
                job.join()
        finally:
            over.set()
            keeper.join()

    def is_saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return any(thread.job.is_saving() for thread in list(self.jobs.values()))

    def claim_jobs(self) -> None:
        """Have a thread serve each job that nobody looks after, unless a reducer with fewer jobs might take it.

        Raises VersionError: the control plane is of another version.
        """
        handshake.check(self.redis, "reducer")
        self.jobs = {job_id: thread for job_id, thread in self.jobs.items() if thread.is_alive}
        free, now = self._free(published_jobs(self.redis)), time.monotonic()
        self._free_since = {job_id: self._free_since.get(job_id, now) for job_id in free}
        for job_id in free:
            if now >= self._free_since[job_id] + stand_back_s(len(self.jobs)):
                self._claim(job_id)

    def _claim(self, job_id: str) -> None:
        self._near = self._near or by_loopback(self.redis)
        rounds = Claim(self.redis, job_id, self.id, Wires.to(self.redis, self._near))
        if self._is_settled(rounds):
            self._asleep[job_id] = time.monotonic() + SETTLED_LOOK_S  # nothing is left to do
        elif rounds.claim(hostname(), os.getpid(), CLAIM_MS):
            self._asleep.pop(job_id, None)
            log.info("claimed", job=job_id, fence=rounds.fence)
            thread = JobThread(rounds, self.artifacts, self.stop)
            self.jobs[job_id] = thread
            thread.start()

    def _is_settled(self, rounds: Claim) -> bool:
        """Whether nothing is left to do for a job: its last version is on disk."""
        try:
            state, raw = rounds.read(), rounds.spec()
            if state is None or state.status != "finished" or raw is None:
                return False
            last = JobSpec.model_validate_json(raw).rounds_total
        except (DamagedRound, ValueError):  # whoever claims it sees to that
            return False
        return state.version == last and Artifacts(self.artifacts, rounds.job_id).has(state.token)

    def _free(self, job_ids: Sequence[str]) -> list[str]:
        """The jobs that may have no reducer.

        A claim that another reducer holds is looked at again when it would end if it were not renewed, or once any is
        given up, so that standing by costs the broker little however many jobs there are.
        """
        given_up: Any = self.redis.get(GIVEN_UP)
        if given_up != self._given_up:
            self._given_up = given_up
            self._asleep.clear()
        now = time.monotonic()
        self._asleep = {job_id: until for job_id, until in self._asleep.items() if until > now}
        due = [job_id for job_id in job_ids if job_id not in self.jobs and job_id not in self._asleep]
        if not due:
            return []
        lives = self.redis.pipeline(transaction=False)
        for job_id in due:
            lives.pttl(JobKeys(job_id).reducer())
        free = []
        for job_id, life_ms in zip(due, lives.execute(), strict=True):
            if 0 < life_ms <= CLAIM_MS:
                self._asleep[job_id] = now + life_ms / 1000
            else:
                free.append(job_id)
        return free

    def _keep_claims(self, over: threading.Event) -> None:
        """Renew every claim; the commit's own compare catches a claim lost meanwhile."""
        while not over.wait(RENEW_S):
            for thread in list(self.jobs.values()):
                try:
                    if thread.holds_claim and not thread.rounds.renew(CLAIM_MS):
                        thread.lose()
                except RedisError:
                    break


def stand_back_s(jobs: int) -> float:
    """How long a reducer with so many jobs leaves a free one to reducers with fewer; those with none look meanwhile."""
    return min(LOOK_S + STAND_BACK_S * jobs, LONGEST_STAND_BACK_S) if jobs else 0.0


def tell_outage(remarks: Seldom, error: RedisError) -> None:
    """Log, now and then, that the broker cannot be used."""
    remarks.tell(log.warning, "broker away, or it refuses", type(error).__name__, error=str(error))


def warm() -> None:
    """Import what takes seconds (the first optimizer above all), so that a reducer standing by takes over at once."""
    import torchvision  # noqa: F401

    import computeshare.tasks.images.models  # noqa: F401
    from computeshare.training.optimizers import ServerOptimizer

    ServerOptimizer(Layout.build(iter([("one", (1,), "parameter")])), OptimizerSpec())


def serve(settings: Settings) -> None:
    """Run one reducer in this process until a signal ends it."""
    import torch

    stop = stop_event()
    url = settings.resolve_redis_url()
    with JobLog(url, Writer("reducer", hostname())) as job_log:
        configure_logging(job_log.capture)
        torch.set_num_threads(1)  # the sum's bits must not depend on a machine's number of cores
        redis = connect(url, retries=3)  # its own loop waits out an outage, job by job
        warm()
        spare_the_collector()
        log.info("reducer ready", pid=os.getpid())
        reducer = Reducer(redis, settings.artifacts_dir, stop)
        end_soon_after(stop, reducer.is_saving)
        reducer.run()


def child(values: dict[str, str]) -> None:
    """Entry point for `computeshare up`: as `serve`, ending with the process that started it."""
    os.environ.update(values)
    exit_with_parent()
    serve(Settings())


def command(
    redis_url: Annotated[str | None, typer.Option(help="Broker; default: the one of `computeshare up` here.")] = None,
    home: Annotated[Path | None, typer.Option(help="Folder of checkpoints and run.json.")] = None,
) -> None:
    """Average the updates of every job that has no other reducer, and commit versions."""
    serve(Settings.given(redis_url=redis_url, home=home))


def main() -> None:
    """The command `computeshare-reducer`."""
    run_command(command)


if __name__ == "__main__":
    main()
