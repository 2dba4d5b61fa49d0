"""Opens a job on the worker's devices, tests and measures them, and builds what they train with.

The first device computes in the seat's process, each other in one of its own, as a recipe's first.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import structlog

from computeshare.bundles.store import BundleStore
from computeshare.codecs.measured_link import MeasuredLink
from computeshare.codecs.messages import UpdateEncoder, feedback_of
from computeshare.codecs.registry import CODECS
from computeshare.errors import SpecError
from computeshare.jobspec.memory_estimate import allowed_bytes
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol.round_store import RoundStore
from computeshare.runtime.processes import collect_garbage, spare_the_collector
from computeshare.settings import Settings
from computeshare.tasks.recipes import requirements
from computeshare.tasks.recipes.bundle import Bundle
from computeshare.tensors.layout import Layout, Weights
from computeshare.training import devices
from computeshare.training.device_group.group import DeviceGroup, GroupComputation
from computeshare.training.private_replica import PrivateReplica
from computeshare.training.recipe_process.process import Part, ProcessLimits, RecipeFiles, RecipeProcess
from computeshare.training.work_units import AnyReplica, kind_with
from computeshare.transport.connections import is_next_door, when_there_is_room
from computeshare.worker.seat.drafts.draft_reader import drafts_of
from computeshare.worker.seat.link_benchmark import measure
from computeshare.worker.seat.overlap.overlapped_replica import OverlappedReplica
from computeshare.worker.seat.overlap.overlapping_loop import OverlappingLoop, overlapping_loop, peer_of
from computeshare.worker.seat.overlap.version_reader import KEPT
from computeshare.worker.seat.seat_context import Ended, SeatContext, Training
from computeshare.worker.seat.seat_loop import ASKED, SeatLoop
from computeshare.worker.seat.seat_setup import SeatMemory, passed, trial_precisions
from computeshare.worker.seat.update_sender import UpdateQueue
from computeshare.worker.seat.weights_receiver import WeightsReceiver

if TYPE_CHECKING:
    from computeshare.training.computation import LocalComputation
    from computeshare.training.device_group.device_process import DeviceProcess

Process = TypeVar("Process", bound=RecipeProcess)
ASK_AGAIN_S = 0.5
"""Seconds between checks that the codecs have been chosen."""
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A job's model and data on this machine's devices; its methods are called in their order."""

    computation: GroupComputation
    device: str
    memory: SeatMemory
    began_at: float
    """When loading began, by `time.perf_counter`."""

    def test(self, seat: SeatContext) -> None:
        """Compare the devices' gradient of the job's model with the CPU's, unless this machine has passed that before.
        Raises Unfit: they differ, or the job does not fit.
        """
        job, precision, memory = seat.seat.job, seat.spec.precision, self.memory
        memory.check()
        trial = passed(self.computation, seat.settings.home, job)
        memory.saved_bytes["float32"] = trial.saved_bytes
        if precision != "float32":
            memory.saved_bytes["bfloat16"] = self.computation.saved_bytes_in_bfloat16()
        if precision != "auto":
            memory.check(precision)
        elif not memory.fits("float32"):
            memory.check("bfloat16")
        spare_the_collector()
        seconds, threads = round(time.perf_counter() - self.began_at, 1), self.computation.kind.get("threads")
        log.info("loaded", job=job, seconds=seconds, device=self.device, threads=threads)

    def measure(self, seat: SeatContext) -> SeatContext:
        """Measure this machine and its link if the job's codecs or precision are still open, and await the choice.
        Returns the seat with it. Raises Unfit: it does not fit; Ended; SpecError: the job's task is another by now.
        """
        if not seat.spec.is_open:
            return seat
        found = self._measured(seat)
        collect_garbage()  # compiled trials
        log.info("measured", job=seat.seat.job, **found.model_dump())
        seat.session.report(found.model_dump_json())
        spec = _chosen(seat)
        if spec.precision != "auto":
            self.memory.check(spec.precision)
        seat.status.rounds = spec.rounds_total
        return replace(seat, spec=spec)

    def _measured(self, seat: SeatContext) -> MeasuredLink:
        precisions = trial_precisions(seat.spec, self.memory)
        computes = {one: self.computation.trial(seat.spec, one) for one in precisions}
        return when_there_is_room(lambda: measure(seat.session, computes, self.computation.layout), seat.stop)

    def prepare(self, seat: SeatContext) -> Training:
        """Build the replicas, what reads weights and what sends updates, and the loop that the strategy asks for."""
        spec, session, computation, kind = seat.spec, seat.session, self.computation, self.computation.kind
        overlapping: OverlappingLoop
        codecs, layout, is_near = spec.codecs, computation.layout, is_next_door(seat.redis)
        feedback = feedback_of(CODECS[codecs.up], layout)
        encoder = UpdateEncoder(CODECS[codecs.up], layout, feedback, compress=not is_near)
        built = None if is_near else computation.built
        replicas = computation.replicas(spec)

        def switch(version: int, load: Callable[[Weights], object], goes_on: Callable[[], bool]) -> None:
            overlapping.switch(version, load, goes_on)

        if peer := peer_of(seat, replicas[0], layout, lambda: overlapping.token):
            replicas = [peer]  # a worker is one peer, on its first device
        if overlap := spec.strategy.early_steps:
            replicas = [OverlappedReplica(one, overlap, spec.plan, layout, switch) for one in replicas]
        devices = _grouped(seat, replicas, computation.names, layout)
        about = kind_with(kind, devices), computation.frozen
        drafts = drafts_of(seat, layout)
        running = (drafts,) if drafts else ()
        if spec.strategy.overlaps:
            inbox = WeightsReceiver(session, codecs.down, layout, drafts=drafts, kept=KEPT, built=built)
            about_loop = feedback, inbox, encoder, self.memory, peer
            overlapping = overlapping_loop(seat, devices, *about_loop, offers=drafts is not None)
            return Training(*about, overlapping.run, running, devices)
        inbox = WeightsReceiver(session, codecs.down, layout, devices.room, drafts, built=built)
        outbox, keeper = UpdateQueue(session, encoder, offers=drafts is not None), seat.keeper
        about_seat = self.memory, seat.status, seat.stop
        loop = SeatLoop(spec, session, keeper, devices, feedback, inbox, outbox, *about_seat)
        return Training(*about, loop.run, (keeper, *running), devices)


def _grouped(seat: SeatContext, replicas: Sequence[AnyReplica], names: Sequence[str], layout: Layout) -> DeviceGroup:
    """The replicas as one, each with noise if the job asks for privacy; logs by what the model is compiled."""
    privacy, job = seat.spec.privacy, seat.seat.job
    devices = DeviceGroup([PrivateReplica(one, privacy, layout) for one in replicas] if privacy else replicas, names)
    seat.session.devices = len(replicas)
    seat.status.units, seat.status.stopped = devices.units, devices.stopped
    if (found := devices.compilation).compiler:
        log.info("compiled", job=job, compiler=found.compiler)
    elif seat.spec.compile:
        log.warning("torch.compile failed: computing without it", job=job, error=found.trouble)
    return devices


def _chosen(seat: SeatContext) -> JobSpec:
    """Wait for the specification with nothing left open. Raises as `measure`."""
    rounds = RoundStore(seat.redis, seat.seat.job)
    while not seat.stop.wait(ASK_AGAIN_S):
        raw = rounds.spec()
        if raw is None:
            raise Ended("the job is gone")
        spec = JobSpec.model_validate_json(raw)
        if spec.task != seat.spec.task:
            raise SpecError("the job's task was changed in the broker after it was loaded: start the job again")
        if not spec.is_open:
            return spec
    raise Ended(ASKED)


@contextmanager
def loaded_model(seat: SeatContext, recipe: Bundle | None, device_name: str | None) -> Iterator[LoadedModel]:
    """Have the job's model and data on the devices that the name means within the block. Raises as `open_all`."""
    began_at = time.perf_counter()
    with contextlib.closing(open_all(seat.spec, recipe, device_name, seat.settings)) as computation:
        device, meter = computation.device, computation.memory
        allowed = allowed_bytes(seat.settings.max_memory) // meter.sharers
        yield LoadedModel(computation, device, SeatMemory(seat.spec, meter, allowed), began_at)


def open_recipe(
    kind: type[Process], spec: JobSpec, recipe: Bundle, device: str | None, settings: Settings, part: Part = "train"
) -> Process:
    """A recipe's model and a part of its data on a device, in a process of their own; the job's bundles are here
    already.

    Raises: RecipeError; BundleError; SettingsError: there is no such device; Unconfined.
    """
    assert spec.recipe_facts
    requirements.check(spec.recipe_facts.requires)
    store = BundleStore(settings.bundles_dir)
    data = store.open_files(spec.data.bundle) if spec.data else None
    files = RecipeFiles(recipe, store.open_files(spec.recipe_facts.initial), data)
    limits = ProcessLimits(allowed_bytes(settings.max_memory), settings.step_limit, unconfined=settings.unconfined)
    process = kind(spec, files, device, limits)
    try:
        return process.open(part)
    except BaseException:
        process.close()
        raise


def open_all(spec: JobSpec, recipe: Bundle | None, preference: str | None, settings: Settings) -> GroupComputation:
    """The job's model and training data on each device that the preference means, as `devices.choose_all`.

    Raises: SettingsError: there is no such device; as `open_recipe`.
    """
    from computeshare.training.computation import open_here

    names = devices.choose_all(preference)
    spec = _with_threads(spec, names)
    with contextlib.ExitStack() as closing:
        if recipe:
            opened = (open_recipe(RecipeProcess, spec, recipe, name, settings) for name in names)
            recipes = [closing.enter_context(contextlib.closing(one)) for one in opened]
            group = GroupComputation(recipes[0], recipes[1:], names)
        else:
            first = open_here(spec, names[0], settings.data_dir, BundleStore(settings.bundles_dir))
            further = (_further(spec, name, settings, first) for name in names[1:])
            others = [closing.enter_context(contextlib.closing(one)) for one in further]
            group = GroupComputation(first, others, names)
        closing.pop_all()
    return group


def _further(spec: JobSpec, name: str, settings: Settings, first: "LocalComputation") -> "DeviceProcess":
    from computeshare.training.device_group.device_process import DeviceProcess

    return DeviceProcess(spec, name, settings.data_dir, settings.bundles_dir, first)


def _with_threads(spec: JobSpec, names: list[str]) -> JobSpec:
    """The job for each of several CPU devices, which divide the processors where it does not say how many it needs."""
    if spec.threads or len(names) == 1 or not names[0].startswith("cpu"):
        return spec
    import torch

    return spec.model_copy(update={"threads": max(1, torch.get_num_threads() // len(names))})
