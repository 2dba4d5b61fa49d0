"""The reducer process: averages a round's updates and commits the next version.

Any number of reducers may run, and each may serve several jobs. A claim that expires gives each job one active reducer;
after that another reducer resumes from the data in Redis or, if Redis is empty, from the last checkpoint on disk.
"""

import os
import random
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import structlog
import typer
from redis import Redis
from redis.exceptions import RedisError

from computeshare.checkpoints.store import Artifacts
from computeshare.errors import DamagedRound
from computeshare.jobspec.optimizer_spec import OptimizerSpec
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol import handshake
from computeshare.protocol.job_log import JobLog
from computeshare.protocol.keys import GIVEN_UP, JobKeys
from computeshare.protocol.reducer_session import ReducerSession
from computeshare.protocol.round_store import published_jobs
from computeshare.queue.recipe_runner import RecipeRunner, runner_of
from computeshare.reducer.job_thread import OUTAGE_S, JobThread, tell_outage
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
from computeshare.terminal.command import Version, run_command
from computeshare.transport.connections import by_loopback, connect
from computeshare.transport.wire import Wires

CLAIM_MS = 2000
RENEW_S = 0.5
JOB_SEARCH_S = 0.25
"""Seconds between searches for jobs without a reducer."""
STAND_BACK_S, LONGEST_STAND_BACK_S = 0.05, 0.5
"""How much longer a reducer leaves a free job to others for each job that it serves, and the longest, in seconds."""
UNABLE_STAND_BACK_S = 10.0
"""How long a reducer leaves a free job that it cannot open to reducers that can, before it says so, in seconds."""
SETTLED_CHECK_S = 1.0
"""Seconds between checks of a job that needs no reducer any more."""

log = structlog.get_logger()


class Reducer:
    """Claims the jobs that have no reducer and renews the claims; each job is served by a thread of its own."""

    def __init__(
        self,
        redis: Redis,
        artifacts: Path,
        bundles: Path,
        stop: threading.Event,
        recipes: RecipeRunner | None = None,
    ) -> None:
        """`recipes`: None: this process runs none, and jobs fail whose recipes' models it would have to split."""
        self.redis, self.artifacts, self.bundles, self.stop, self.recipes = redis, artifacts, bundles, stop, recipes
        self.id = uuid.uuid4().hex[:12]
        self.jobs: dict[str, JobThread] = {}
        self._near: Redis | None = None
        self._asleep: dict[str, float] = {}
        """Job id to the monotonic time until which the job is left out of searches: its claim cannot expire earlier."""
        self._free_since: dict[str, float] = {}
        """Job id to the monotonic time when the job was first seen without a reducer."""
        self._given_up: bytes | None = None
        """Count of claims given up, as read by the last search."""
        self._remarks = Seldom(REMARK_EVERY_S)

    def run(self) -> None:
        """Serve until `stop` is set; wait while the broker is away."""
        over = threading.Event()
        keeper = threading.Thread(target=self._keep_claims, args=(over,), name="claims", daemon=True)
        keeper.start()
        try:
            while not self.stop.is_set():
                try:
                    self.claim_jobs()
                    self.stop.wait(JOB_SEARCH_S)
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
        """Claim jobs without a reducer, after a delay in which less busy reducers may claim them; start their threads.

        Raises VersionError: the control plane is of another version.
        """
        handshake.check(self.redis, "reducer")
        self.jobs = {job_id: thread for job_id, thread in self.jobs.items() if thread.is_alive}
        free, now = self._free(published_jobs(self.redis)), time.monotonic()
        self._free_since = {job_id: self._free_since.get(job_id, now) for job_id in free}
        for job_id in free:
            if (waited_s := now - self._free_since[job_id]) >= stand_back_s(len(self.jobs)):
                self._claim(job_id, waited_s)

    def _claim(self, job_id: str, waited_s: float) -> None:
        self._near = self._near or by_loopback(self.redis)
        session = ReducerSession(self.redis, job_id, self.id, Wires.to(self.redis, self._near))
        if self._is_settled(session):
            self._asleep[job_id] = time.monotonic() + SETTLED_CHECK_S  # nothing is left to do
        elif waited_s < UNABLE_STAND_BACK_S and not self._can_open(session):
            return
        elif session.claim(hostname(), os.getpid(), CLAIM_MS):
            self._asleep.pop(job_id, None)
            log.info("claimed", job=job_id, fence=session.fence)
            thread = JobThread(session, self.artifacts, self.bundles, self.stop, self.recipes)
            self.jobs[job_id] = thread
            thread.start()

    def _is_settled(self, session: ReducerSession) -> bool:
        """Whether a job needs no reducer any more: its last version is on disk."""
        try:
            state, raw = session.read(), session.spec()
            if state is None or state.status != "finished" or raw is None:
                return False
            last = JobSpec.model_validate_json(raw).rounds_total
        except (DamagedRound, ValueError):  # the reducer that claims the job handles the damage
            return False
        return state.version == last and Artifacts(self.artifacts, session.job_id).has(state.token)

    def _can_open(self, session: ReducerSession) -> bool:
        """Whether this reducer can open a job: a recipe's model that is still to be split needs one with `recipes`."""
        if self.recipes is not None or session.stages() is not None:
            return True
        try:
            spec = JobSpec.model_validate_json(session.spec() or "")
        except ValueError:  # the reducer that claims the job handles the damage
            return True
        return spec.recipe is None or spec.strategy.staging is None

    def _free(self, job_ids: Sequence[str]) -> list[str]:
        """The jobs that may have no reducer.

        Another reducer's claim is checked again when it would expire without renewal, or once any claim is given up, so
        that a standby costs the broker little however many jobs there are.
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
        """Renew every claim until `over` is set; a commit fails by itself if its claim was lost meanwhile."""
        while not over.wait(RENEW_S):
            for thread in list(self.jobs.values()):
                try:
                    if thread.holds_claim and not thread.session.renew(CLAIM_MS):
                        thread.lose()
                except RedisError:
                    break


def stand_back_s(jobs: int) -> float:
    """How long a reducer with this number of jobs leaves a free job to less busy reducers, in seconds."""
    return min(JOB_SEARCH_S + STAND_BACK_S * jobs, LONGEST_STAND_BACK_S) if jobs else 0.0


def warm() -> None:
    """Import the slow modules and build a first optimizer, so that a standby takes over at once."""
    import torchvision  # noqa: F401

    import computeshare.tasks.images.models  # noqa: F401
    from computeshare.training.optimizers import ServerOptimizer

    ServerOptimizer(Layout.build(iter([("one", (1,), "parameter")])), OptimizerSpec())


def serve(settings: Settings) -> None:
    """Run one reducer in this process until a signal ends it."""
    import torch

    stop = stop_event()
    url = settings.resolve_redis_url("reducer")
    with JobLog(url, Writer("reducer", hostname())) as job_log:
        configure_logging(job_log.capture)
        torch.set_num_threads(1)  # the sum's bits must not depend on a machine's number of cores
        redis = connect(url, retries=3)  # each job's thread waits while the broker is away
        warm()
        spare_the_collector()
        log.info("reducer ready", pid=os.getpid())
        reducer = Reducer(redis, settings.artifacts_dir, settings.bundles_dir, stop, runner_of(settings))
        end_soon_after(stop, reducer.is_saving)
        reducer.run()


def child(values: dict[str, str]) -> None:
    """Entry point for `computeshare up`: `serve`, until the parent process ends."""
    os.environ.update(values)
    exit_with_parent()
    serve(Settings())


def command(
    redis_url: Annotated[str | None, typer.Option(help="Broker; default: the one of `computeshare up` here.")] = None,
    home: Annotated[Path | None, typer.Option(help="Folder of checkpoints and run.json.")] = None,
    recipes: Annotated[
        bool | None,
        typer.Option("--recipes", help="Also split recipes' models into stages: their code then runs here."),
    ] = None,
    version: Version = False,
) -> None:
    """Average the updates of every job that has no other reducer, and commit versions."""
    serve(Settings.given(redis_url=redis_url, home=home, recipes=recipes))


def main() -> None:
    """The command `computeshare-reducer`."""
    run_command(command)


if __name__ == "__main__":
    main()
