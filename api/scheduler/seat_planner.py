"""Which worker should have which seat. Pure: what is wanted, what there is, and the time, as arguments."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from api.scheduler.fair_share import Owners, Step, Want, settle, shares

STUCK_MS = 15_000
"""A seat that its worker, alive and idle, has not begun after this long is handed out again."""
LEAVE_MS = 10_000
"""How long the seats of a job that ended or was paused may take to leave by themselves."""
LONGEST_LEAVE_MS = 600_000
"""How long a worker that was asked to leave a seat may work at its unit: one that hangs would keep it for good."""
LONGEST_PAUSE_MS = 30_000
"""The longest wait before a worker whose seats keep ending is given another one in the same job."""
BRIEF_MS = 4000
"""A worker that waits no longer than this is not given to another job meanwhile."""
TAKE_OVER_MS = 3000
"""How long a job of higher priority is short of workers before it takes one over, and the time to the next."""
REBALANCE_MS = 10_000
"""The same among jobs of one priority: a model is loaded anew for each worker that changes over."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a job that is queued or running wants. `seats` is 0 once all its rounds are done.

    `short_ms` is how long it has had fewer workers than its share, `moved_ms` how long ago one was last asked to change
    over from it or to it (None: not lately).
    """

    job_id: str
    queue: str
    seats: int
    minimum: int
    started: bool
    priority: int = 0
    short_ms: int = 0
    moved_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Available:
    """A worker that is alive, and the seat it says it is serving.

    `resting` is why it takes no seat just now and leaves the one it has by itself, `off` why it gets none at present
    and is asked to leave the one it has, as what it is: `drained`. Both are empty for a worker that works.
    """

    id: str
    queues: tuple[str, ...]
    seat: str | None = None
    resting: str = ""
    off: str = ""

    @property
    def works(self) -> bool:
        """Whether it takes seats at present."""
        return not (self.resting or self.off)


@dataclass(frozen=True, slots=True)
class HeldSeat:
    """A seat that was given out and has not ended, as far as SQLite knows; `state` is RQ's word for it.

    `waiting_ms` is how long its worker has been idle meanwhile, `stopped_ms` how long ago its job ended or was paused
    (None: neither). `leaving_ms` is how long ago its worker was asked to leave (None: it was not), `left_to` for which
    job, if for one.
    """

    id: str
    job_id: str
    worker: str
    number: int
    state: str
    waiting_ms: int = 0
    stopped_ms: int | None = None
    leaving_ms: int | None = None
    left_to: str | None = None

    @property
    def leaving(self) -> bool:
        return self.leaving_ms is not None


@dataclass(frozen=True, slots=True)
class QueueShare:
    """How many workers a job has, and is to have."""

    holds: int
    due: int


@dataclass(frozen=True, slots=True)
class Past:
    """A seat that ended a short while ago."""

    id: str
    job_id: str
    worker: str
    state: str
    ended_ms_ago: int


@dataclass(frozen=True, slots=True)
class Issue:
    """Give this worker a seat."""

    job_id: str
    worker: str
    number: int


@dataclass(frozen=True, slots=True)
class Close:
    """A seat is over: `finished`, `left`, `failed`, `lost` or `stopped`; `stop`: RQ has to be told to end it."""

    seat_id: str
    state: str
    stop: bool


@dataclass(frozen=True, slots=True)
class Leave:
    """A seat's worker is to finish its work unit and leave, for the job `to` if for one.

    `why` is `priority` or `share`, where `to` has more right to the worker, else what the worker is: `drained`.
    """

    seat_id: str
    to: str | None
    why: str


Action = Issue | Close | Leave


Pair = tuple[str, str]
"""A job's id and a worker's."""


def decide_seats(
    demands: Sequence[Demand],
    workers: Sequence[Available],
    held: Sequence[HeldSeat],
    past: Sequence[Past] = (),
    out: Collection[Pair] = (),
    due: Mapping[str, int] | None = None,
) -> list[Action]:
    """Compare the seats that jobs want with the workers that are alive.

    Args:
        demands: oldest job first.
        workers: those alive; one seat per worker at a time.
        held: every seat that has not ended yet.
        past: the seats that ended in the last minutes: the more of them, the longer the pause.
        out: who gets no seat in which job.
        due: the shares, by job, where they are known already.
    Returns: seats to close, seats whose workers are to leave, then seats to issue.
    """
    floor = _Floor.of(demands, workers, held, past, out)
    owners = settle(floor.wants, shares(floor.wants) if due is None else due, floor.owners, floor.may_change)
    actions: list[Action] = list(floor.closed)
    actions += [action for seat in floor.kept if (action := floor.recalled(seat, owners))]
    chosen: dict[str, list[str]] = {}
    for worker in floor.free:
        job_id = owners.get(worker.id)
        if job_id is not None and not _pause_ms(job_id, worker.id, floor.past):
            chosen.setdefault(job_id, []).append(worker.id)
    for job_id in (demand.job_id for demand in demands if demand.job_id in chosen):
        taken = {seat.number for seat in floor.kept if seat.job_id == job_id}
        numbers = _unused(taken, len(chosen[job_id]))
        actions += [Issue(job_id, worker, number) for worker, number in zip(chosen[job_id], numbers, strict=True)]
    return actions


def fair_shares(
    demands: Sequence[Demand],
    workers: Sequence[Available],
    held: Sequence[HeldSeat],
    past: Sequence[Past] = (),
    out: Collection[Pair] = (),
) -> dict[str, QueueShare]:
    """How many workers each job is to have, and has, of those alive; arguments as for `decide_seats`."""
    wants = _Floor.of(demands, workers, held, past, out).wants
    counts = shares(wants)
    return {want.job_id: QueueShare(want.holds, counts[want.job_id]) for want in wants}


@dataclass(frozen=True, slots=True)
class _Floor:
    """What seats are decided by: which are over, which are kept, who is free and who serves whom.

    A worker that was asked to leave one job for another counts as the other's already.
    """

    demands: Mapping[str, Demand]
    workers: Mapping[str, Available]
    closed: Sequence[Close]
    kept: Sequence[HeldSeat]
    past: Sequence[Past]
    free: Sequence[Available]
    wants: Sequence[Want]
    owners: Owners

    @classmethod
    def of(
        cls,
        demands: Sequence[Demand],
        workers: Sequence[Available],
        held: Sequence[HeldSeat],
        past: Sequence[Past],
        out: Collection[Pair],
    ) -> "_Floor":
        alive = {worker.id: worker for worker in workers}
        wanted = {demand.job_id: demand for demand in demands}
        closed = [close for seat in held if (close := _close(seat, alive.get(seat.worker), wanted.get(seat.job_id)))]
        gone = {close.seat_id for close in closed}
        kept = [seat for seat in held if seat.id not in gone]
        past = [*past, *(Past(s.id, s.job_id, s.worker, s.state, 0) for s in held if s.id in gone and not s.leaving)]
        taken = {seat.worker for seat in kept}
        known = {seat.id for seat in past} | gone
        idle = [w for w in workers if w.id not in taken and (w.seat is None or w.seat in known) and w.works]
        owners = {s.worker: job for s in kept if (job := s.left_to if s.leaving else s.job_id) in wanted}
        owners = {w: job for w, job in owners.items() if alive[w].works and (job, w) not in out}
        there = [*idle, *(alive[seat.worker] for seat in kept if alive[seat.worker].works)]
        return cls(wanted, alive, closed, kept, past, idle, _wants(demands, there, owners, past, out), owners)

    def may_change(self, steps: list[Step]) -> bool:
        """Whether a job has been short for long enough, and none of those concerned has just given or got a worker."""
        asks, loser = self.demands[steps[0].taker], steps[-1].giver
        above = loser is None or self.demands[loser].priority < asks.priority
        patience_ms = TAKE_OVER_MS if above else REBALANCE_MS
        concerned = [asks, *(self.demands[step.giver] for step in steps if step.giver)]
        moved = [demand.moved_ms for demand in concerned if demand.moved_ms is not None]
        return asks.short_ms >= patience_ms and min(moved, default=patience_ms) >= patience_ms

    def recalled(self, seat: HeldSeat, owners: Owners) -> Action | None:
        """How a seat ends whose worker is to do something else, if it is."""
        other = owners.get(seat.worker)
        off = self.workers[seat.worker].off
        if seat.leaving or seat.job_id not in self.demands or (not off and other in (None, seat.job_id)):
            return None
        if seat.state in ("pending", "queued"):
            return Close(seat.id, "stopped", stop=True)
        if off or other is None:
            return Leave(seat.id, None, off)
        above = self.demands[other].priority > self.demands[seat.job_id].priority
        return Leave(seat.id, other, "priority" if above else "share")


def _wants(
    demands: Sequence[Demand],
    workers: Sequence[Available],
    owners: Owners,
    past: Sequence[Past],
    out: Collection[Pair],
) -> list[Want]:
    """What each job could use. Jobs of one queue share one tuple of workers, but for those that differ."""
    pausing = {(seat.job_id, seat.worker) for seat in past}
    barred = [*out, *(pair for pair in pausing if _pause_ms(*pair, past) > BRIEF_MS)]
    barred_of, mine_of = _by_job(barred), _by_job((job_id, worker) for worker, job_id in owners.items())
    queues = {queue for worker in workers for queue in worker.queues}
    lines = {queue: tuple(w.id for w in workers if queue in w.queues) for queue in queues}
    wants = []
    for demand in demands:
        mine, not_it = mine_of.get(demand.job_id, set()), barred_of.get(demand.job_id, set())
        serving = lines.get(demand.queue, ())
        if not_it or (mine and not mine.issubset(serving)):
            may = mine | (set(serving) - not_it)
            serving = tuple(worker.id for worker in workers if worker.id in may)
        about = (demand.job_id, demand.priority, demand.seats, demand.minimum, demand.started)
        wants.append(Want(*about, serving, len(mine)))
    return wants


def _by_job(pairs: Iterable[Pair]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for job_id, worker in pairs:
        found.setdefault(job_id, set()).add(worker)
    return found


def _close(seat: HeldSeat, worker: Available | None, demand: Demand | None) -> Close | None:
    """Why a seat is over, if it is."""
    if seat.state in ("finished", "failed"):
        return Close(seat.id, "left" if seat.leaving else seat.state, stop=False)
    if seat.state == "missing":
        return Close(seat.id, "lost", stop=False)
    if worker is None:
        return Close(seat.id, "lost", stop=True)
    if demand is None:
        overdue = seat.stopped_ms is None or seat.stopped_ms > LEAVE_MS
        return Close(seat.id, "stopped", stop=True) if overdue or seat.state == "queued" else None
    hangs = seat.leaving_ms is not None and seat.leaving_ms > LONGEST_LEAVE_MS
    if hangs or (worker.resting and seat.state == "queued"):
        return Close(seat.id, "stopped", stop=True)
    stuck = seat.state != "pending" and seat.waiting_ms > STUCK_MS
    return Close(seat.id, "lost", stop=True) if stuck else None


def _pause_ms(job_id: str, worker: str, past: Sequence[Past]) -> int:
    """How long this worker, whose seats in this job end so often, still has to wait: 1 s, 2 s, 4 s, ... in all."""
    mine = (seat for seat in past if seat.job_id == job_id and seat.worker == worker)
    ends = [seat.ended_ms_ago for seat in mine if seat.state in ("finished", "failed")]
    return max(0, min(LONGEST_PAUSE_MS, 500 * 2 ** min(len(ends), 20)) - min(ends)) if ends else 0


def _unused(taken: set[int], count: int) -> list[int]:
    return [n for n in range(1, len(taken) + count + 1) if n not in taken][:count]
