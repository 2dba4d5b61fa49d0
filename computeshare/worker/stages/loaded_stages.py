"""A job whose model is split into stages, as a seat has loaded it."""

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from computeshare.jobspec.memory_estimate import allowed_bytes
from computeshare.pipeline.chains.stage_needs import needs
from computeshare.pipeline.recipes.process import StageProcess
from computeshare.protocol.round_store import RoundStore
from computeshare.runtime.processes import spare_the_collector
from computeshare.tasks.recipes.bundle import Bundle
from computeshare.training.work_units import SelfTestResult
from computeshare.types import Kind
from computeshare.worker.seat.device_setup import open_recipe
from computeshare.worker.seat.seat_context import Ended, SeatContext, Training
from computeshare.worker.seat.seat_loop import ASKED
from computeshare.worker.seat.seat_setup import SeatMemory, passed
from computeshare.worker.stages.stage_loop import StageLoop, StageSeat, join_members
from computeshare.worker.stages.stage_setup import RecipeSetup, StageSetup, await_stages, open_stages


@dataclass(frozen=True, slots=True)
class LoadedStages:
    """The job's data and its split, but no weights yet; as `LoadedModel`, its methods are called in their order."""

    setup: StageSetup
    device: str
    memory: SeatMemory

    def test(self, seat: SeatContext) -> None:
        """Compare the device's gradients of stages with the CPU's, unless this machine has passed that before. Raises
        Unfit: they differ, or the job does not fit.
        """
        self.memory.check()
        passed(DeviceTest(self.setup, self.memory.room_bytes), seat.settings.home, seat.seat.job)
        spare_the_collector()

    def measure(self, seat: SeatContext) -> SeatContext:
        """Returns the seat as it is: such a job leaves nothing open."""
        return seat

    def prepare(self, seat: SeatContext) -> Training:
        """Build the loop that holds the stages of each placement, and the membership."""
        setup, memory = self.setup, self.memory
        wires, mail = seat.connections.open(seat.stop.is_set), seat.connections.open(paced=True)
        membership = join_members(seat.redis, seat.session, setup, memory, seat.stop)
        about = seat.redis, seat.session, seat.keeper, setup, membership, memory
        loop = StageLoop(StageSeat(*about, seat.status, wires, mail, seat.stop))
        return Training(setup.kind, "", loop.run, (seat.keeper, membership))


@dataclass(frozen=True, slots=True)
class DeviceTest:
    """The device's test with the stages that take no more than `room_bytes`."""

    setup: StageSetup
    room_bytes: int

    @property
    def identity(self) -> Mapping[str, Any]:
        setup = self.setup
        needed = needs(setup.stages, setup.spec.staging, setup.spec.plan)
        tested = [number for number, one in enumerate(needed) if one.bytes <= self.room_bytes]
        return {**setup.identity, "cuts": setup.stages.cuts, "stages": tested}

    @property
    def device(self) -> str:
        return self.setup.device

    @property
    def kind(self) -> Kind:
        return self.setup.kind

    def test(self) -> SelfTestResult:
        return self.setup.test(self.room_bytes)


@contextmanager
def loaded_stages(seat: SeatContext, recipe: Bundle | None, device_name: str | None) -> Iterator[LoadedStages]:
    """Await the split, and have the data, and a recipe's process, open within the block. Raises Ended; as `open_stages`
    and `open_recipe`.
    """
    spec, settings = seat.spec, seat.settings
    stages = await_stages(RoundStore(seat.redis, seat.seat.job), seat.stop)
    if stages is None:
        raise Ended(ASKED if seat.stop.is_set() else "the job is gone")
    with contextlib.ExitStack() as closing:
        setup: StageSetup
        if recipe and spec.recipe_facts:
            process = open_recipe(StageProcess, spec, recipe, device_name, settings)
            closing.enter_context(contextlib.closing(process))
            setup = RecipeSetup(spec, stages.cut(spec.recipe_facts.layout), stages, process)
        else:
            setup = open_stages(spec, device_name, settings, stages)
        memory = SeatMemory(spec, setup.memory, allowed_bytes(settings.max_memory))
        yield LoadedStages(setup, setup.device, memory)
