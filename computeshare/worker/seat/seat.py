"""One seat: a worker's participation in one job, in a process of its own.

Fetches the job's files, loads it, tests the device, measures for what is not chosen yet, joins, runs the strategy's
loop, and leaves.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import structlog
from redis import Redis
from redis.exceptions import OutOfMemoryError

from computeshare.codecs.messages import in_parts
from computeshare.errors import ArtifactError, CodecError, Fenced, Interrupted, JobGone, RecipeError, Unfit
from computeshare.jobspec.spec import JobSpec
from computeshare.jobspec.tasks.own_data import TRAINING_FILES
from computeshare.protocol.job_log import JobLog, log_warnings
from computeshare.protocol.round_store import RoundStore
from computeshare.queue import Seat
from computeshare.queue.seats import RECIPE_FAILED
from computeshare.runtime.log_lines import Writer
from computeshare.runtime.processes import configure_logging, hostname, keep_freed_memory
from computeshare.settings import Settings
from computeshare.tasks.recipes.bundle import Bundle
from computeshare.training.device_group.group import DeviceGroup
from computeshare.transport.connections import connect, is_forwarded, when_there_is_room
from computeshare.worker.recipe_consent import Consent
from computeshare.worker.seat.bundle_fetch import fetched
from computeshare.worker.seat.progress_pipe import Teller
from computeshare.worker.seat.seat_context import Ended, SeatContext, Training
from computeshare.worker.seat.seat_loop import ASKED

if TYPE_CHECKING:
    from computeshare.worker.seat.device_setup import LoadedModel
    from computeshare.worker.stages.loaded_stages import LoadedStages

    LoadedJob = LoadedModel | LoadedStages

LONGEST_REASON = 500
"""Characters of the reason for which a seat ends; the gateway refuses much longer texts."""
UNKNOWN_S = 15.0
"""Seconds for which a job may be unknown to a broker that came back empty, before it is taken to have ended."""
log = structlog.get_logger()


def serve(seat_id: str) -> str:
    """Run a seat until its job ends, the worker leaves, or another session takes over; returns why it ended."""
    settings, seat = Settings(), Seat.parse(seat_id)
    if seat.scores:
        from computeshare.worker.seat.scoring_seat import score

        return score(seat, settings)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])  # blocked until a handler was set
    if stop.is_set():
        return ASKED
    keep_freed_memory()
    url = settings.resolve_redis_url("worker")
    with JobLog(url, Writer(seat.worker, settings.name or hostname()), seat.job) as job_log:
        configure_logging(job_log.capture)
        log_warnings()
        redis = connect(url)
        spec = RoundStore(redis, seat.job).spec()
        if spec is None:
            return "the job is gone"
        seat_session = SeatSession(redis, seat, JobSpec.model_validate_json(spec), settings, stop)
        return seat_session.run(settings.device)


class SeatSession:
    """A seat's session in the round protocol, from loading to leaving."""

    def __init__(self, redis: Redis, seat: Seat, spec: JobSpec, settings: Settings, stop: threading.Event) -> None:
        self.context = SeatContext.of(redis, seat, spec, settings, stop)
        self._teller = Teller(self.context.progress)

    def run(self, device_name: str | None) -> str:
        """Take part in the job, then leave. Returns the reason for the end."""
        seat, reason = self.context, "left"
        recipe: Bundle | None = None
        job: LoadedJob | None = None
        has_joined = False
        try:
            with ExitStack() as resources:
                recipe = resources.enter_context(_files(seat))
                job = resources.enter_context(_loaded(seat, recipe, device_name))
                job.test(seat)
                seat = job.measure(seat)
                training = job.prepare(seat)
                seat.status.is_loaded = True
                self._teller.tell()  # from here on the worker lets the seat finish its work
                _join(seat, job, training)
                has_joined = True
                _take_over(seat, training.devices)
                reason = _train(training)
                _hand_over(seat, training.devices)
        except (Fenced, JobGone, Ended) as ended:
            reason = str(ended)
        except (Interrupted, OutOfMemoryError):
            reason = ASKED
        except Unfit as unfit:
            reason = str(unfit)
            self._tell_unfit(reason, job)
        except BaseException as error:
            reason = f"failed: {type(error).__name__}: {error}"
            if recipe and isinstance(error, RecipeError):  # its code was started: the failure is its own
                reason = f"{RECIPE_FAILED}{error}"
            if not has_joined:  # the job's page shows why the worker does not join
                self._announce("left", reason)
            raise
        finally:
            log.info("leaving", job=seat.seat.job, reason=reason)
            seat.session.leave(reason[:LONGEST_REASON])
        return reason

    def _tell_unfit(self, reason: str, job: "LoadedJob | None") -> None:
        """Tell the control plane why this worker must not get a seat in this job again. `job`: None, if not loaded."""
        device, memory_bytes = (job.device, job.memory.needed_bytes) if job else ("", 0)
        name = self.context.settings.name or hostname()
        self._announce("unfit", reason, name=name, device=device, memory_bytes=memory_bytes)
        log.error("this machine cannot take part in the job", job=self.context.seat.job, reason=reason)

    def _announce(self, kind: str, reason: str, **more: Any) -> None:
        """Add to the job's events, as soon as the broker and the gateway have room; not once the worker is to leave."""
        seat, session_id = self.context.seat, self.context.session.session_id
        about = {"worker": seat.worker, "session": session_id, "reason": reason[:LONGEST_REASON], **more}
        rounds = RoundStore(self.context.redis, seat.job)
        with contextlib.suppress(OutOfMemoryError):
            when_there_is_room(lambda: rounds.append(kind, about), self.context.stop)


@contextmanager
def _files(seat: SeatContext) -> Iterator[Bundle | None]:
    """Have the job's files on this machine within the block; those of its recipe, if the owner lets it run.

    Raises: as `Consent.require` and `fetched`.
    """
    spec, settings, own = seat.spec, seat.settings, seat.seat
    recipe = Consent.of(settings).require(seat.redis, own.job, spec) if spec.recipe else None
    only, goes_on = () if recipe else (TRAINING_FILES,), lambda: not seat.stop.is_set()
    with fetched(seat.redis, spec.bundles, settings, goes_on, seat.note_fetched, only, own.worker):
        yield recipe


def _loaded(seat: SeatContext, recipe: Bundle | None, device_name: str | None) -> "AbstractContextManager[LoadedJob]":
    """The job on this machine's devices: whole, or to hold stages of its model as they are given to this worker."""
    spec = seat.spec
    log.info("loading", job=seat.seat.job, model=spec.model or spec.recipe, dataset=spec.dataset)
    if spec.strategy.staging:
        from computeshare.worker.stages.loaded_stages import loaded_stages

        return loaded_stages(seat, recipe, device_name)
    from computeshare.worker.seat.device_setup import loaded_model

    return loaded_model(seat, recipe, device_name)


def _join(seat: SeatContext, job: "LoadedJob", training: Training) -> None:
    """Join the job once it is open. Raises Ended: the job has ended, or does not admit this worker; Unfit: this machine
    has built other parameters than the job's of those that are not trained, or joined before as another kind.
    """
    spec, session = seat.spec, seat.session
    machine = {"device": job.device, "kind": training.kind, "memory_bytes": job.memory.needed_bytes}
    about = {"name": seat.settings.name or hostname(), **machine}
    rounds, known_at = RoundStore(seat.redis, seat.seat.job), time.monotonic()
    while not seat.stop.is_set():
        status = when_there_is_room(lambda: session.join(seat.seat.id, about, training.frozen), seat.stop)
        if status == "running":
            codecs = {"up": spec.codecs.up, "down": spec.codecs.down}
            log.info("joined", job=seat.seat.job, model=spec.model or spec.recipe, device=job.device, **codecs)
            return
        if status == "banned":
            raise Ended("this worker is banned from the job: too many of its updates were refused")
        if status == "unlike":
            raise Unfit(
                "the parameters that are not trained are built by every machine, and this one builds others than "
                "the job's: install the same version of torch as in the control plane, and the same files"
            )
        if status == "altered":
            raise Unfit(
                "the job has audits, and this worker joined it before as a machine of another kind (device, "
                "threads or versions): restart the worker"
            )
        if status != "unopened":
            raise Ended(f"the job is {status}")
        if rounds.spec() is not None:
            known_at = time.monotonic()
        elif time.monotonic() - known_at > UNKNOWN_S:
            raise Ended("the job is gone")
        session.wait(1000)
    raise Ended(ASKED)


def _take_over(seat: SeatContext, devices: DeviceGroup | None) -> None:
    """Take over the inner state of a worker that has left, if the strategy keeps inner states. A machine that joined by
    an invite takes over none, and hands none over.
    """
    if devices and (kept := devices.kept) and not is_forwarded(seat.redis):
        try:
            if state := seat.session.take_over():
                kept.restore(state)
        except (ArtifactError, CodecError) as error:
            log.warning("inner state not taken over", job=seat.seat.job, error=str(error))


def _train(training: Training) -> str:
    """Compute until the job or the seat ends. Returns the reason."""
    with ExitStack() as threads:
        for thread in training.threads:
            threads.enter_context(thread)
        return training.loop()


def _hand_over(seat: SeatContext, devices: DeviceGroup | None) -> None:
    """Hand the replica's inner state over to another worker, if the job is not over."""
    if devices is None:
        return
    status, kept = seat.session.extend(()), devices.kept
    if not kept or is_forwarded(seat.redis):
        return
    if status in ("running", "paused") and (state := kept.dump()):
        try:
            seat.session.hand_over(in_parts(state))
        except OutOfMemoryError as error:
            log.warning("inner state not handed over", job=seat.seat.job, error=str(error))
