"""A job whose model is split into stages, as a seat has loaded it."""

from dataclasses import dataclass

from computeshare.jobspec.memory_estimate import allowed_bytes
from computeshare.protocol.round_store import RoundStore
from computeshare.runtime.processes import spare_the_collector
from computeshare.worker.seat.seat_context import Ended, SeatContext, Training
from computeshare.worker.seat.seat_loop import ASKED
from computeshare.worker.seat.seat_setup import SeatMemory
from computeshare.worker.stages.stage_loop import StageLoop, StageSeat, join_members
from computeshare.worker.stages.stage_setup import StageSetup, await_stages, open_stages


@dataclass(frozen=True, slots=True)
class LoadedStages:
    """The job's data and its split, but no weights yet; as `LoadedModel`, its methods are called in their order."""

    setup: StageSetup
    device: str
    memory: SeatMemory

    def test(self, seat: SeatContext) -> None:
        """Raises Unfit: the job does not fit."""
        self.memory.check()
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


def load_stages(seat: SeatContext, device_name: str | None) -> LoadedStages:
    """Await the split, and open the data. Raises Ended; as `open_stages`."""
    stages = await_stages(RoundStore(seat.redis, seat.seat.job), seat.stop)
    if stages is None:
        raise Ended(ASKED if seat.stop.is_set() else "the job is gone")
    setup = open_stages(seat.spec, device_name, seat.settings, stages)
    memory = SeatMemory(seat.spec, setup.memory, allowed_bytes(seat.settings.max_memory))
    return LoadedStages(setup, setup.device, memory)
