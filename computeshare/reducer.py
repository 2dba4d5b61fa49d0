"""The reducer process: averages a round's updates and commits the next version.

Any number of them may run. Each job has one active reducer, by a claim that expires; another takes over from what
lies in Redis, or, if Redis came back empty, from the last checkpoint on disk.
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

from computeshare import handshake
from computeshare.artifacts import Artifacts
from computeshare.broker import by_loopback, connect
from computeshare.commands.run import run_command
from computeshare.errors import ComputeShareError, LostClaim
from computeshare.keys import GIVEN_UP, JobKeys
from computeshare.layout import Layout
from computeshare.loglines import REMARK_EVERY_S, Seldom, Writer
from computeshare.logs import JobLog
from computeshare.processes import (
    configure_logging,
    end_soon_after,
    exit_with_parent,
    hostname,
    spare_the_collector,
    stop_event,
)
from computeshare.reduction import JobReducer
from computeshare.rounds import Claim, published_jobs
from computeshare.settings import Settings
from computeshare.spec import OptimizerSpec
from computeshare.wire import Wires

CLAIM_MS = 2000
RENEW_S = 0.5
LOOK_S = 0.25
"""How often an idle reducer looks for new jobs, and for claims that were given up."""
SETTLED_LOOK_S = 1.0
"""How often it looks at a job of which nothing is left to do."""

log = structlog.get_logger()


class Reducer:
    """Serves every job it can claim."""

    def __init__(self, redis: Redis, artifacts: Path, stop: threading.Event) -> None:
        self.redis, self.artifacts, self.stop = redis, artifacts, stop
        self.id = uuid.uuid4().hex[:12]
        self.wires: Wires | None = None
        self.jobs: dict[str, JobReducer] = {}
        self._claims: dict[str, Claim] = {}
        self._lost: set[Claim] = set()
        self._looked = 0.0
        self._asleep: dict[str, float] = {}
        """Job to the moment when it may need a reducer: another's claim may have ended by then."""
        self._given_up: bytes | None = None
        """How many claims had been given up when it looked the last time."""
        self._remarks = Seldom(REMARK_EVERY_S)

    def run(self) -> None:
        """Serve until told to stop; an outage of the broker is waited out."""
        threading.Thread(target=self._keep_claims, name="claims", daemon=True).start()
        while not self.stop.is_set():
            try:
                self._turn()
            except RedisError as error:
                kind = type(error).__name__
                self._remarks.tell(log.warning, "broker away, or it refuses", kind, error=str(error))
                self.stop.wait(random.uniform(0.5, 1.5))
        for job_id in list(self.jobs):
            with contextlib.suppress(RedisError):
                self._release(job_id)

    def is_saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return any(job.is_saving() for job in list(self.jobs.values()))

    def _turn(self) -> None:
        """Claim what nobody looks after, then sleep until a round is full (or a moment passed) and reduce it."""
        self._drop_lost()
        if time.monotonic() - self._looked > LOOK_S:
            self._looked = time.monotonic()
            self._claim_jobs()
        if not self.jobs:
            self.stop.wait(LOOK_S)
            return
        patience_s = min(LOOK_S, *(job.look_again_s for job in self.jobs.values()))
        (job_id, job), *others = self.jobs.items()
        if not others and not job.is_held:
            self._serve(job_id, patience_s)  # which sleeps and looks in one exchange
            return
        full = {job.rounds.keys.full(): job_id for job_id, job in self.jobs.items()}
        signalled: Any = self.redis.blpop(list(full), timeout=patience_s)
        due = [full[signalled[0].decode()]] if signalled else list(self.jobs)
        for job_id in due:
            self._serve(job_id)

    def _serve(self, job_id: str, patience_s: float = 0.0) -> None:
        """Let one job advance; whatever goes wrong with it is that job's affair alone."""
        job = self.jobs[job_id] = self.jobs.pop(job_id)  # to the end: the others' turn comes first
        try:
            if job.advance(patience_s):
                return
        except LostClaim as lost:
            log.warning("lost claim", job=job_id, reason=str(lost))
        except RedisError:
            if not job.is_looking:
                # What was done in memory may or may not have been committed: start again from what Redis holds.
                self._drop(job_id)
            raise
        except ComputeShareError as error:
            log.error("job failed", job=job_id, error=str(error))
            job.fail(str(error), traceback.format_exc())
        except Exception as error:
            log.exception("job failed", job=job_id)
            job.fail(f"{type(error).__name__}: {error}", traceback.format_exc())
        self._release(job_id)

    def _claim_jobs(self) -> None:
        handshake.check(self.redis, "reducer")
        for job_id in self._free(published_jobs(self.redis)):
            self.wires = self.wires or Wires.to(self.redis, by_loopback(self.redis))
            rounds = Claim(self.redis, job_id, self.id, self.wires)
            state = rounds.read()
            if state and state.status == "finished" and Artifacts(self.artifacts, job_id).has(state.token):
                self._asleep[job_id] = time.monotonic() + SETTLED_LOOK_S  # nothing is left to do
                continue
            if not rounds.claim(hostname(), os.getpid(), CLAIM_MS):
                continue
            self._asleep.pop(job_id, None)
            log.info("claimed", job=job_id, fence=rounds.fence)
            self._claims[job_id] = rounds  # renewed from now on: building a model may take longer than a claim
            self.jobs[job_id] = JobReducer(rounds, self.artifacts)
            self._serve(job_id)

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

    def _drop(self, job_id: str) -> Claim | None:
        """Forget a job; its claim expires by itself."""
        self.jobs.pop(job_id).close()
        return self._claims.pop(job_id, None)

    def _release(self, job_id: str) -> None:
        """Forget a job, so that another reducer may claim it at once."""
        if rounds := self._drop(job_id):
            rounds.renew(0)
            self.redis.incr(GIVEN_UP)

    def _drop_lost(self) -> None:
        """Forget the jobs whose claim ran out: another may have taken over, or the broker has lost it."""
        lost, self._lost = self._lost, set()
        for rounds in lost:
            if self._claims.get(rounds.job_id) is rounds:
                log.warning("lost claim", job=rounds.job_id, reason="it ran out")
                self._drop(rounds.job_id)

    def _keep_claims(self) -> None:
        """Renew every claim; the commit's own compare catches a claim lost meanwhile."""
        while not self.stop.wait(RENEW_S):
            for rounds in list(self._claims.values()):
                try:
                    if not rounds.renew(CLAIM_MS):
                        self._lost.add(rounds)
                except RedisError:
                    break


def warm() -> None:
    """Import what takes seconds (the first optimizer above all), so that a reducer standing by takes over at once."""
    import torchvision  # noqa: F401

    import computeshare.training.models  # noqa: F401
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
