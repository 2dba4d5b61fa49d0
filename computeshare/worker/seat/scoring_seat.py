"""A scoring seat: this worker scores checkpoints of a job that the control plane asks for, one at a time, and does not
train.
"""

import contextlib
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import structlog
import torch
from redis import Redis

from computeshare.bundles.exchange import FetchProgress, fetch
from computeshare.bundles.store import BundleStore, cache_limit
from computeshare.checkpoints.part_score import PartScore
from computeshare.checkpoints.scorers import CheckpointScorer, LocalScorer
from computeshare.checkpoints.store import Artifacts
from computeshare.errors import ArtifactError, RecipeError, RecipeUnfit, ShapeError
from computeshare.jobspec.memory_estimate import allowed_bytes
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol.job_log import JobLog
from computeshare.protocol.round_store import RoundStore
from computeshare.queue import Seat, score_requests
from computeshare.queue.score_requests import ScoreRequest
from computeshare.runtime.failpoints import failpoint
from computeshare.runtime.log_lines import Writer
from computeshare.runtime.processes import configure_logging, hostname
from computeshare.settings import Settings
from computeshare.tasks.recipes.bundle import Bundle
from computeshare.training.computation import choose_device, open_here
from computeshare.training.recipe_process.process import RecipeProcess
from computeshare.transport.connections import connect
from computeshare.types import Token
from computeshare.worker.recipe_consent import Consent
from computeshare.worker.seat.bundle_fetch import fetched
from computeshare.worker.seat.device_setup import open_recipe
from computeshare.worker.seat.progress_pipe import SeatProgress, Teller
from computeshare.worker.seat.seat_loop import ASKED
from computeshare.worker.seat.seat_setup import checked

IDLE_TURNS = 10
"""Waits in a row (of `score_requests.BLOCK_S`) without a request, after which the seat ends."""
log = structlog.get_logger()


class _Asked(BaseException):
    """The worker was asked to leave: it leaves at once, and another scores."""


def score(seat: Seat, settings: Settings) -> str:
    """Score until no checkpoint waits, the job is gone or the worker is to leave; returns why it ended."""
    url = settings.resolve_redis_url("worker")
    with JobLog(url, Writer(seat.worker, settings.name or hostname()), seat.job) as job_log:
        configure_logging(job_log.capture)
        try:
            with _leaving():
                redis = connect(url)
                raw = RoundStore(redis, seat.job).spec()
                if raw is None:
                    return "the job is gone"
                return ScoringSeat(redis, seat, JobSpec.model_validate_json(raw), settings).run()
        except _Asked:
            return ASKED


@contextmanager
def _leaving() -> Iterator[None]:
    """Raise _Asked within the block at the first signal to end."""

    def leave(*_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise _Asked

    signal.signal(signal.SIGTERM, leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])  # blocked until a handler was set
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


class ScoringSeat:
    """Answers the control plane's requests; what it loads for the first is kept for the others."""

    def __init__(self, redis: Redis, seat: Seat, spec: JobSpec, settings: Settings) -> None:
        self.redis, self.seat, self.spec, self.settings = redis, seat, spec, settings
        folder, self._data = settings.bundles_dir, settings.data_dir
        self._store = BundleStore(folder, cache_limit(folder, allowed_bytes(settings.cache)))
        self._version = 0
        self._fetched = FetchProgress(0, 0, 0, 0)
        self._loaded = ExitStack()
        self._scorer: CheckpointScorer | None = None
        self._teller = Teller(self._progress)

    def run(self) -> str:
        """Score until none waits; returns why it ended. Raises what keeps this machine from scoring."""
        idle = 0
        self._teller.tell()
        with contextlib.closing(self):
            while idle < IDLE_TURNS:
                request = score_requests.take(self.redis, self.seat)
                idle = 0 if request else idle + 1
                if request:
                    found = self._answer(request)
                    score_requests.answer(self.redis, self.seat, request, found)
                    if isinstance(found, Exception) and not isinstance(found, ArtifactError | ShapeError):
                        raise found  # another machine may do better
        return "no version waits for a score"

    def close(self) -> None:
        """Give up what was loaded."""
        self._scorer = None
        self._loaded.close()

    def _answer(self, request: ScoreRequest) -> PartScore | Exception:
        """The score, or the error that keeps this worker from computing it."""
        try:
            return self._score(request)
        except Exception as error:  # told to the control plane, which shows it and asks again later
            log.error("cannot score", job=self.seat.job, token=request.token, error=f"{type(error).__name__}: {error}")
            self.close()
            return error

    def _score(self, request: ScoreRequest) -> PartScore:
        token, files, store = Token.parse(request.token), request.files, self._store
        self._version = token.version
        scorer = self._scorer or self._load()
        try:
            with store.using(files):
                fetch(self.redis, store, files, progress=self._tell, worker=self.seat.worker)
                failpoint("before_score")
                found = scorer.score(Artifacts.at(store.open_files(files)), token, request.part)
        finally:
            store.remove(files)
        log.info(
            "scored", job=self.seat.job, version=token.version, part=request.part, loss=found.loss, **found.metrics
        )
        return found

    def _load(self) -> CheckpointScorer:
        """Fetch what the job needs, and load its model and data."""
        recipe = None
        if self.spec.recipe:
            try:
                recipe = Consent.of(self.settings).require(self.redis, self.seat.job, self.spec)
            except RecipeError as error:  # no fault of the recipe's code
                raise RecipeUnfit(str(error)) from error
        wanted = fetched(self.redis, self.spec.bundles, self.settings, lambda: True, self._tell, (), self.seat.worker)
        self._loaded.enter_context(wanted)
        log.info("loading to score", job=self.seat.job, model=self.spec.model or self.spec.recipe)
        scorer = self._recipe(recipe) if recipe else LocalScorer(self.spec, self._data, self._store, self._device())
        self._scorer = CheckpointScorer(self.spec, self._loaded.enter_context(closing(scorer)))
        return self._scorer

    def _device(self) -> torch.device:
        """The device to score on: the worker's own, or the CPU if that computes wrongly."""
        device = choose_device(self.spec, self.settings.device)
        if device.type == "cpu":
            return device
        with closing(open_here(self.spec, self.settings.device, self._data, self._store)) as computation:
            trial = checked(computation, self.settings.home)
        if trial.trouble:
            log.warning("scoring on the CPU, since the device failed its self-test", error=trial.trouble)
        return torch.device("cpu") if trial.trouble else device

    def _recipe(self, recipe: Bundle) -> RecipeProcess:
        """The recipe's process, on the worker's own device, or on the CPU if that computes wrongly."""
        spec = self.spec.model_copy(update={"threads": 1})  # as an evaluator: what a recipe computes may depend on it
        process = open_recipe(RecipeProcess, spec, recipe, self.settings.device, self.settings, spec.scored_part)
        if process.memory.device_type == "cpu":
            return process
        if not (trial := checked(process, self.settings.home)).trouble:
            return process
        process.close()
        log.warning("scoring on the CPU, since the device failed its self-test", error=trial.trouble)
        return open_recipe(RecipeProcess, spec, recipe, "cpu", self.settings, spec.scored_part)

    def _tell(self, now: FetchProgress) -> None:
        self._fetched = now

    def _progress(self) -> SeatProgress:
        """This seat's progress, for the worker's display: it is never `loading`, so that it can be asked to leave."""
        moved = self._fetched.bytes_sent, self._fetched.bytes_received
        return SeatProgress("scoring", self.spec.title, self._version, self.spec.rounds_total, 0, *moved)
