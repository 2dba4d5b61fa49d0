"""One seat: a worker's participation in one job, in a process of its own.

Loads the job, measures for its codecs if they are not chosen yet, joins, runs `SeatLoop`, and leaves.
"""

import contextlib
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import structlog
from redis import Redis
from redis.exceptions import OutOfMemoryError

from computeshare.bundles.exchange import FetchProgress
from computeshare.codecs.messages import UpdateEncoder, feedback_of, in_parts
from computeshare.codecs.registry import CODECS
from computeshare.errors import ArtifactError, CodecError, Fenced, Interrupted, JobGone, RecipeError, SpecError, Unfit
from computeshare.gossip.exchange import Partners
from computeshare.gossip.peer_replica import PeerReplica
from computeshare.gossip.peer_weights import PeerWeights
from computeshare.jobspec.memory_estimate import allowed_bytes
from computeshare.jobspec.spec import JobSpec
from computeshare.jobspec.tasks.own_data import TRAINING_FILES
from computeshare.protocol.job_log import JobLog, log_warnings
from computeshare.protocol.round_store import RoundStore
from computeshare.protocol.worker_session import WorkerSession
from computeshare.queue import Seat
from computeshare.queue.seats import RECIPE_FAILED
from computeshare.runtime.log_lines import Writer
from computeshare.runtime.processes import configure_logging, hostname, keep_freed_memory, spare_the_collector
from computeshare.settings import Settings
from computeshare.tasks.recipes.bundle import Bundle
from computeshare.tensors.layout import Layout
from computeshare.training.device_group.group import DeviceGroup, GroupComputation
from computeshare.training.private_replica import PrivateReplica
from computeshare.training.work_units import AnyReplica, Compilation, Computation, kind_with
from computeshare.transport.connections import by_loopback, connect, is_forwarded, is_next_door, when_there_is_room
from computeshare.transport.rate_limit import Pacer, parse_rate
from computeshare.transport.wire import Wires
from computeshare.worker.recipe_consent import Consent
from computeshare.worker.seat.bundle_fetch import fetched
from computeshare.worker.seat.drafts.draft_reader import DraftReader
from computeshare.worker.seat.lease_keeper import LeaseKeeper
from computeshare.worker.seat.link_benchmark import measure
from computeshare.worker.seat.overlap.overlapping_loop import OverlappingLoop
from computeshare.worker.seat.overlap.update_uploads import Uploads
from computeshare.worker.seat.overlap.version_reader import KEPT, VersionReader
from computeshare.worker.seat.progress_pipe import SeatProgress, Teller
from computeshare.worker.seat.seat_loop import ASKED, SeatLoop, SeatStatus
from computeshare.worker.seat.seat_setup import SeatMemory, test_device, trial_precisions
from computeshare.worker.seat.update_sender import UpdateQueue
from computeshare.worker.seat.weights_receiver import WeightsReceiver

ASK_AGAIN_S = 0.5
"""Seconds between checks that the codecs have been chosen."""
LONGEST_REASON = 500
"""Characters of the reason for which a seat ends; the gateway refuses much longer texts."""
log = structlog.get_logger()


class Ended(Exception):
    """The seat ends before it joins; the message is the reason."""


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
    url = settings.resolve_redis_url()
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
        self.redis, self.seat, self.spec, self.settings, self.stop = redis, seat, spec, settings, stop
        self.name = settings.name or hostname()
        session_id = os.environ.get("RQ_EXECUTION_ID") or uuid.uuid4().hex
        self._pacer = Pacer(parse_rate(settings.max_up)) if settings.max_up else None
        self.wires = Wires.to(redis, by_loopback(redis), pacer=self._pacer, interrupt=self._is_called_off)
        self.session = WorkerSession(redis, seat.job, seat.worker, session_id, self.wires)
        self.keeper = LeaseKeeper(self.session)
        self.others: list[Wires] = []
        """Of threads: for other workers' weights, where the strategy has peers; for both directions, where a seat
        computes meanwhile; for what goes from stage to stage.
        """
        self.status = SeatStatus()
        self.memory: SeatMemory | None = None
        """None until the device is chosen."""
        self.device = ""
        self.devices: DeviceGroup | None = None
        """None until the replicas are built."""
        self.joined = False
        self.runs_recipe = False
        """Whether the job's recipe has been started: from here on a RecipeError is its own."""
        self.teller = Teller(self._progress)

    def run(self, device_name: str | None) -> str:
        """Take part in the job, then leave. Returns the reason for the end."""
        reason = "left"
        try:
            reason = self._take_part(device_name)
        except (Fenced, JobGone, Ended) as ended:
            reason = str(ended)
        except (Interrupted, OutOfMemoryError):
            reason = ASKED
        except Unfit as unfit:
            reason = str(unfit)
            self._tell_unfit(reason)
        except BaseException as error:
            reason = f"failed: {type(error).__name__}: {error}"
            if self.runs_recipe and isinstance(error, RecipeError):
                reason = f"{RECIPE_FAILED}{error}"
            if not self.joined:  # the job's page shows why the worker does not join
                about = {
                    "worker": self.seat.worker,
                    "session": self.session.session_id,
                    "reason": reason[:LONGEST_REASON],
                }
                self._announce("left", about)
            raise
        finally:
            log.info("leaving", job=self.seat.job, reason=reason)
            self.session.leave(reason[:LONGEST_REASON])
        return reason

    def _announce(self, kind: str, about: dict[str, Any]) -> None:
        """Add to the job's events, as soon as the broker and the gateway have room; not once the worker is to leave."""
        rounds = RoundStore(self.redis, self.seat.job)
        with contextlib.suppress(OutOfMemoryError):
            when_there_is_room(lambda: rounds.append(kind, about), self.stop)

    def _tell_unfit(self, reason: str) -> None:
        """Tell the control plane why this worker must not get a seat in this job again."""
        about: dict[str, Any] = {
            "worker": self.seat.worker,
            "session": self.session.session_id,
            "reason": reason[:LONGEST_REASON],
        }
        about |= {
            "name": self.name,
            "device": self.device,
            "memory_bytes": self.memory.needed_bytes if self.memory else 0,
        }
        self._announce("unfit", about)
        log.error("this machine cannot take part in the job", job=self.seat.job, reason=reason)

    def _take_part(self, device_name: str | None) -> str:
        """Fetch the job's files, load it, await its codecs, join, and compute. Returns the reason for the end."""
        with ExitStack() as resources:
            recipe = (
                Consent.of(self.settings).require(self.redis, self.seat.job, self.spec) if self.spec.recipe else None
            )
            resources.enter_context(
                fetched(
                    self.redis,
                    self.spec.bundles,
                    self.settings,
                    self._goes_on,
                    self._tell_fetched,
                    () if self.spec.recipe else (TRAINING_FILES,),
                    self.seat.worker,
                )
            )
            log.info("loading", job=self.seat.job, model=self.spec.model or self.spec.recipe, dataset=self.spec.dataset)
            if self.spec.strategy.staging:
                return self._hold_stages(device_name)
            started = time.perf_counter()
            computation = resources.enter_context(contextlib.closing(self._open(device_name, recipe)))
            self.device = computation.device
            memory = self.memory = SeatMemory(
                self.spec, computation.memory, allowed_bytes(self.settings.max_memory) // computation.memory.sharers
            )
            test_device(self.seat.job, self.spec, computation, memory, self.settings.home)
            spare_the_collector()
            seconds, threads = round(time.perf_counter() - started, 1), computation.kind.get("threads")
            log.info("loaded", job=self.seat.job, seconds=seconds, device=self.device, threads=threads)
            if self.spec.is_open:
                self._measure(computation, memory)
                self.spec = self._chosen()
                if self.spec.precision != "auto":
                    memory.check(self.spec.precision)
            return self._train(computation, memory)

    def _open(self, device_name: str | None, recipe: Bundle | None) -> GroupComputation:
        """The job's model and data on this machine's devices: each but the first in a process of its own, a recipe's
        first, too.
        """
        from computeshare.worker.seat.device_setup import open_all

        self.runs_recipe = recipe is not None
        return open_all(self.spec, recipe, device_name, self.settings)

    def _train(self, computation: GroupComputation, memory: SeatMemory) -> str:
        """Join, and compute until the job or the seat ends. Returns the reason."""
        codecs, layout, kind = self.spec.codecs, computation.layout, computation.kind
        feedback = feedback_of(CODECS[codecs.up], layout)
        is_near = is_next_door(self.redis)
        encoder = UpdateEncoder(CODECS[codecs.up], layout, feedback, compress=not is_near)
        built = None if is_near else computation.built
        replicas = computation.replicas(self.spec)
        if peer := self._peer(replicas[0], layout, lambda: loop.token):
            replicas = [peer]  # a worker is one peer, on its first device
        if self.spec.privacy:
            replicas = [PrivateReplica(one, self.spec.privacy, layout) for one in replicas]
        devices = self.devices = DeviceGroup(replicas, computation.names)
        self.session.devices = len(replicas)
        self._tell_compilation(devices.compilation)
        overlaps = self.spec.strategy.overlaps
        drafts = self._drafts(layout)
        into, kept = (None, KEPT) if overlaps else (devices.room, 1)
        inbox = WeightsReceiver(self.session, codecs.down, layout, into, drafts, kept, built)
        self.status.is_loaded = True
        self.teller.tell()  # from here on the worker lets the seat finish its work
        about = {"kind": kind_with(kind, devices), "memory_bytes": memory.needed_bytes}
        self._join(about, computation.frozen)
        self._take_over(devices)
        about_seat = memory, self.status, self.stop
        if overlaps:
            versions, uploads = self._overlapping(inbox, encoder)
            loop = OverlappingLoop(self.spec, self.session, devices, feedback, versions, uploads, *about_seat, peer)
            reason = loop.run()
        else:
            outbox = UpdateQueue(self.session, encoder, offers=drafts is not None)
            with self.keeper, drafts or contextlib.nullcontext():
                reason = SeatLoop(
                    self.spec, self.session, self.keeper, devices, feedback, inbox, outbox, *about_seat
                ).run()
        self._hand_over(devices)
        return reason

    def _drafts(self, layout: Layout) -> DraftReader | None:
        """What reads parts of the next version while this worker sends, over a connection of its own; None: the job has
        no such parts, or the broker is on this machine, where they would save nothing.
        """
        if not self.spec.has_drafts or len(layout.buckets) == 1 or is_next_door(self.redis):
            return None
        reader: DraftReader
        wires = Wires.to(self.redis, interrupt=lambda: reader.is_over or self.stop.is_set())
        self.others.append(wires)
        reader = DraftReader(WorkerSession(self.redis, self.seat.job, self.seat.worker, self.session.session_id, wires))
        return reader

    def _overlapping(self, inbox: WeightsReceiver, encoder: UpdateEncoder) -> tuple[VersionReader, Uploads]:
        """What reads versions and sends updates while the seat computes, each over connections of its own."""
        versions: VersionReader
        uploads: Uploads
        redis, near, session = self.redis, by_loopback(self.redis), self.session
        up = Wires.to(redis, near, pacer=self._pacer, interrupt=lambda: uploads.are_called_off)
        down = Wires.to(redis, near, interrupt=lambda: versions.is_over)
        self.others += [up, down]
        about = self.seat.job, self.seat.worker, session.session_id
        versions = VersionReader(WorkerSession(redis, *about, down), inbox)
        uploads = Uploads(WorkerSession(redis, *about, up), encoder, session)
        return versions, uploads

    def _hold_stages(self, device_name: str | None) -> str:
        """Join, and compute stages of the model as they are given to this worker, until the job or the seat ends."""
        from computeshare.worker.stages.stage_loop import StageLoop, StageSeat, join_members
        from computeshare.worker.stages.stage_setup import await_stages, open_stages

        stages = await_stages(RoundStore(self.redis, self.seat.job), self.stop)
        if stages is None:
            raise Ended(ASKED if self.stop.is_set() else "the job is gone")
        setup = open_stages(self.spec, device_name, self.settings, stages)
        self.device = setup.device
        memory = self.memory = SeatMemory(self.spec, setup.memory, allowed_bytes(self.settings.max_memory))
        memory.check()
        spare_the_collector()
        wires, mail = Wires.to(self.redis, interrupt=self.stop.is_set), Wires.to(self.redis, pacer=self._pacer)
        self.others += [wires, mail]
        self.status.is_loaded = True
        self.teller.tell()
        self._join({"kind": setup.kind, "memory_bytes": memory.needed_bytes}, "")
        with self.keeper, join_members(self.redis, self.session, setup, memory, self.stop) as membership:
            seat = StageSeat(
                self.redis, self.session, self.keeper, setup, membership, memory, self.status, wires, mail, self.stop
            )
            return StageLoop(seat).run()

    def _peer(self, replica: AnyReplica, layout: Layout, token: Callable[[], str]) -> PeerReplica | None:
        """The replica with weights of its own, where the strategy has peers."""
        spec, averaging, worker = self.spec, self.spec.strategy.averaging, self.seat.worker
        if averaging is None:
            return None
        self.others.append(Wires.to(self.redis, interrupt=self.stop.is_set))
        source = PeerWeights.of_job(self.redis, self.seat.job, worker, self.others[-1])
        partners = Partners(worker, spec.seed, averaging.matching)
        return PeerReplica(replica, averaging, source, partners, CODECS[spec.codecs.up], layout, token)

    def _tell_compilation(self, found: Compilation) -> None:
        """Log by what the model is compiled, or why it is not, if the job asks for it."""
        if found.compiler:
            log.info("compiled", job=self.seat.job, compiler=found.compiler)
        elif self.spec.compile:
            log.warning("torch.compile failed: computing without it", job=self.seat.job, error=found.trouble)

    def _measure(self, computation: Computation, memory: SeatMemory) -> None:
        """Measure this machine and its link, and report the measurement, by which the reducer chooses what is open."""
        precisions = trial_precisions(self.spec, memory)
        computes = {one: computation.trial(self.spec, one) for one in precisions}
        found = when_there_is_room(lambda: measure(self.session, computes, computation.layout), self.stop)
        log.info("measured", job=self.seat.job, **found.model_dump())
        self.session.report(found.model_dump_json())

    def _chosen(self) -> JobSpec:
        """Wait for the specification with nothing left open. Raises Ended; SpecError: its task is another by now."""
        rounds = RoundStore(self.redis, self.seat.job)
        while not self.stop.wait(ASK_AGAIN_S):
            raw = rounds.spec()
            if raw is None:
                raise Ended("the job is gone")
            spec = JobSpec.model_validate_json(raw)
            if spec.task != self.spec.task:
                raise SpecError("the job's task was changed in the broker after it was loaded: start the job again")
            if not spec.is_open:
                return spec
        raise Ended(ASKED)

    def _join(self, about: dict[str, Any], frozen: str) -> None:
        """Join the job once it is open. Raises Ended: the job has ended, or does not admit this worker; Unfit: this
        machine has built other parameters than the job's of those that are not trained, whose digest is `frozen`.
        """
        about = {"name": self.name, "device": self.device, **about}
        while not self.stop.is_set():
            status = when_there_is_room(lambda: self.session.join(self.seat.id, about, frozen), self.stop)
            if status == "running":
                self.joined = True
                codecs = {"up": self.spec.codecs.up, "down": self.spec.codecs.down}
                log.info(
                    "joined", job=self.seat.job, model=self.spec.model or self.spec.recipe, device=self.device, **codecs
                )
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
            self.session.wait(1000)
        raise Ended(ASKED)

    def _take_over(self, replica: DeviceGroup) -> None:
        """Take over the inner state of a worker that has left, if the strategy keeps inner states. A machine that
        joined by an invite takes over none, and hands none over.
        """
        if (kept := replica.kept) and not is_forwarded(self.redis):
            try:
                if state := self.session.take_over():
                    kept.restore(state)
            except (ArtifactError, CodecError) as error:
                log.warning("inner state not taken over", job=self.seat.job, error=str(error))

    def _hand_over(self, replica: DeviceGroup) -> None:
        """Hand the replica's inner state over to another worker, if the job is not over."""
        status, kept = self.session.extend(()), replica.kept
        if not kept or is_forwarded(self.redis):
            return
        if status in ("running", "paused") and (state := kept.dump()):
            try:
                self.session.hand_over(in_parts(state))
            except OutOfMemoryError as error:
                log.warning("inner state not handed over", job=self.seat.job, error=str(error))

    def _progress(self) -> SeatProgress:
        """This seat's progress, for the worker's display."""
        status = self.status
        state = ("working" if status.is_working else "waiting") if status.is_loaded else "loading"
        files = status.fetched or FetchProgress(0, 0, 0, 0)
        moved = files.bytes_sent, files.bytes_received
        for wires in (self.wires, *self.others):
            moved = moved[0] + wires.bytes_sent, moved[1] + wires.bytes_received
        lacking = (files.done_bytes, files.total_bytes) if files.done_bytes < files.total_bytes else (0, 0)
        about = self.spec.title, status.version, self.spec.rounds_total, status.samples
        devices = self.devices
        units, stopped = (devices.units, sorted(devices.stopped)) if devices else ((), ())
        return SeatProgress(state, *about, *moved, *lacking, tuple(units), tuple(stopped))

    def _tell_fetched(self, now: FetchProgress) -> None:
        self.status.fetched = now

    def _goes_on(self) -> bool:
        return not self.stop.is_set()

    def _is_called_off(self) -> bool:
        """Whether the update being sent is no longer wanted; interrupts the wire."""
        return self.status.is_working and not self.keeper.takes_more()
