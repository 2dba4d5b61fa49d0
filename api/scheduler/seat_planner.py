"""Decides which worker should have which seat. Pure: demand, supply and time are arguments."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from api.scheduler.fair_share import Owners, SeatDemand, SeatMove, settle, shares

STUCK_MS = 15_000
"""How long a worker that is alive and idle may take to begin its seat; after that the seat is issued again."""
LEAVE_MS = 10_000
"""How long the seats of an ended or paused job may take to end by themselves."""
LONGEST_LEAVE_MS = 600_000
"""How long a worker that was asked to leave a seat may work on its unit: a worker that hangs would never leave."""
LONGEST_PAUSE_MS = 30_000
"""The longest wait before a worker whose seats keep ending gets another seat in the same job."""
BRIEF_MS = 4000
"""A worker that waits no longer than this is not given to another job meanwhile."""
TAKE_OVER_MS = 3000
"""How long a job is short of workers before it takes a worker from a job of lower priority, and the least time between
two such changes.
"""
REBALANCE_MS = 10_000
"""The same between jobs of one priority: each worker that changes over has to load another model."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The demand of an active job. `seats` is 0 once all rounds are done.

    `short_ms` is how long the job has had fewer workers than its share, `moved_ms` the time since a worker was last
    asked to change over from or to the job (None: not lately). `requires` is what it requires of a worker, in words,
    `prefers` how many of its preferences a worker meets, for those that meet any.
    """

    job_id: str
    queue: str
    seats: int
    minimum: int
    started: bool
    priority: int = 0
    short_ms: int = 0
    moved_ms: int | None = None
    requires: str = ""
    prefers: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Available:
    """A worker that is alive, and the seat that it reports to serve.

    `resting` is why the worker takes no seat now and leaves its seat by itself; `off` is why it gets no seat and is
    asked to leave its seat (for example `drained`). Both are empty for a worker that works.
    """

    id: str
    queues: tuple[str, ...]
    seat: str | None = None
    resting: str = ""
    off: str = ""

    @property
    def works(self) -> bool:
        """Whether the worker takes seats at present."""
        return not (self.resting or self.off)


@dataclass(frozen=True, slots=True)
class HeldSeat:
    """A seat that has not ended, according to SQLite. `state` is `pending` before delivery to RQ, then the state from
    `SeatQueue.state`.

    `waiting_ms` is how long the seat's worker has been idle, `stopped_ms` the time since the job ended or was paused
    (None: neither), `leaving_ms` the time since the worker was asked to leave (None: not asked), and `left_to` the job
    for which the worker was asked to leave, if any.
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
    """A job's current number of workers (`holds`) and its fair share (`due`)."""

    holds: int
    due: int


@dataclass(frozen=True, slots=True)
class Past:
    """A seat that ended recently."""

    id: str
    job_id: str
    worker: str
    state: str
    ended_ms_ago: int


@dataclass(frozen=True, slots=True)
class Issue:
    """Give a worker a seat."""

    job_id: str
    worker: str
    number: int


@dataclass(frozen=True, slots=True)
class Close:
    """Close a seat as `finished`, `left`, `failed`, `lost` or `stopped`; `stop` says whether RQ has to end it."""

    seat_id: str
    state: str
    stop: bool


@dataclass(frozen=True, slots=True)
class Leave:
    """Ask a seat's worker to finish its work unit and leave, for the job `to` if given.

    `why` is `priority` or `share` if `to` has the stronger claim to the worker, else the worker's `off`.
    """

    seat_id: str
    to: str | None
    why: str


Action = Issue | Close | Leave


Pair = tuple[str, str]
"""(job id, worker id)."""


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
        workers: all live workers; a worker has at most one seat at a time.
        held: every seat that has not ended yet.
        past: the seats that ended in the last minutes; the more there are, the longer a worker's pause.
        out: the pairs of job and worker that get no seat.
        due: the shares by job, if known already.
    Returns: seats to close, seats whose workers are to leave, then seats to issue.
    """
    floor = _Floor.of(demands, workers, held, past, out)
    owners = settle(floor.wants, shares(floor.wants) if due is None else due, floor.owners, floor.may_change)
    actions: list[Action] = list(floor.closed)
    actions += [action for seat in floor.kept if (action := floor.recalled(seat, owners))]
    chosen: dict[str, list[str]] = {}
    for worker in floor.free:
        job_id = owners.get(worker.id)
        if job_id is not None and not pause_ms(job_id, worker.id, floor.past):
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
    """Each job's current number of live workers and its fair share; arguments as for `decide_seats`."""
    wants = _Floor.of(demands, workers, held, past, out).wants
    counts = shares(wants)
    return {want.job_id: QueueShare(want.holds, counts[want.job_id]) for want in wants}


@dataclass(frozen=True, slots=True)
class _Floor:
    """The basis of a decision: seats to close, seats to keep, free workers, and the job of each worker.

    A worker that was asked to leave one job for another already belongs to the other.
    """

    demands: Mapping[str, Demand]
    workers: Mapping[str, Available]
    closed: Sequence[Close]
    kept: Sequence[HeldSeat]
    past: Sequence[Past]
    free: Sequence[Available]
    wants: Sequence[SeatDemand]
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
        closed = [close for seat in held if (close := closing(seat, alive.get(seat.worker), wanted.get(seat.job_id)))]
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

    def may_change(self, steps: list[SeatMove]) -> bool:
        """Whether the asking job has been short for long enough, and no job concerned just gave or got a worker."""
        asks, loser = self.demands[steps[0].taker], steps[-1].giver
        above = loser is None or self.demands[loser].priority < asks.priority
        patience_ms = TAKE_OVER_MS if above else REBALANCE_MS
        concerned = [asks, *(self.demands[step.giver] for step in steps if step.giver)]
        moved = [demand.moved_ms for demand in concerned if demand.moved_ms is not None]
        return asks.short_ms >= patience_ms and min(moved, default=patience_ms) >= patience_ms

    def recalled(self, seat: HeldSeat, owners: Owners) -> Action | None:
        """The action that ends a seat whose worker is to leave its job; None if the worker stays."""
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
) -> list[SeatDemand]:
    """The `SeatDemand` of each job. Jobs of one queue share one tuple of workers, unless their workers differ.

    A job's best workers come first: those that meet most of its preferences, then those that fewest jobs prefer.
    """
    wanted_by = Counter(worker for demand in demands for worker in demand.prefers)
    pausing = {(seat.job_id, seat.worker) for seat in past}
    barred = [*out, *(pair for pair in pausing if pause_ms(*pair, past) > BRIEF_MS)]
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
        if wanted_by:
            serving = _best_first(serving, demand.prefers, wanted_by)
        about = (demand.job_id, demand.priority, demand.seats, demand.minimum, demand.started)
        wants.append(SeatDemand(*about, serving, len(mine)))
    return wants


def _best_first(serving: Sequence[str], met: Mapping[str, int], wanted_by: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(sorted(serving, key=lambda worker: (-met.get(worker, 0), wanted_by.get(worker, 0))))


def _by_job(pairs: Iterable[Pair]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for job_id, worker in pairs:
        found.setdefault(job_id, set()).add(worker)
    return found


def closing(seat: HeldSeat, worker: Available | None, demand: Demand | None) -> Close | None:
    """The action that closes a seat which is over; None if it is not."""
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


def pause_ms(job_id: str, worker: str, past: Sequence[Past]) -> int:
    """The remaining wait of a worker whose seats in a job keep ending: 1 s, 2 s, 4 s, ... after the last end."""
    mine = (seat for seat in past if seat.job_id == job_id and seat.worker == worker)
    ends = [seat.ended_ms_ago for seat in mine if seat.state in ("finished", "failed")]
    return max(0, min(LONGEST_PAUSE_MS, 500 * 2 ** min(len(ends), 20)) - min(ends)) if ends else 0


def _unused(taken: set[int], count: int) -> list[int]:
    return [n for n in range(1, len(taken) + count + 1) if n not in taken][:count]
