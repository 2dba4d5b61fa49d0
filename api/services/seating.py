"""Which worker should have which seat. Pure: what is wanted, what there is, and the time, as arguments."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

STUCK_MS = 15_000
"""A seat that its worker, alive and idle, has not begun after this long is handed out again."""
LEAVE_MS = 10_000
"""How long the seats of a job that ended or was paused may take to leave by themselves."""
FAILURES = 5
"""A worker whose seats in a job failed this often in a row, none of them having joined, cannot start."""
LEFT_OUT_MS = (10_000, 30_000, 60_000, 120_000, 300_000, 600_000)
"""How long such a worker is left out of the job after that failure and each further one."""
LONGEST_PAUSE_MS = 30_000
"""The longest wait before a worker whose seats keep ending is given another one in the same job."""
SHOWN = 3
"""So many workers are named in a reason; the others are counted."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a job that is queued or running wants. `seats` is 0 once all its rounds are done."""

    job_id: str
    queue: str
    seats: int
    minimum: int
    started: bool


@dataclass(frozen=True, slots=True)
class Available:
    """A worker that is alive, and the seat it says it is serving."""

    id: str
    queues: tuple[str, ...]
    seat: str | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """A seat that was given out and has not ended, as far as SQLite knows; `state` is RQ's word for it.

    `waiting_ms` is how long its worker has been idle meanwhile, `stopped_ms` how long ago its job ended or was paused
    (None: neither).
    """

    id: str
    job_id: str
    worker: str
    number: int
    state: str
    waiting_ms: int = 0
    stopped_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Try:
    """A seat that ended, or with which its worker joined the job last (`ended_ms` is None while it serves)."""

    job_id: str
    worker: str
    state: str
    joined: bool
    ended_ms: int | None


@dataclass(frozen=True, slots=True)
class Failing:
    """A worker that cannot start in a job: how often in a row it failed, and until when it is left out."""

    times: int
    until_ms: int


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
    """A seat is over: `finished`, `failed`, `lost` or `stopped`; `stop` says that RQ has to be told to end it."""

    seat_id: str
    state: str
    stop: bool


Action = Issue | Close


Pair = tuple[str, str]
"""A job's id and a worker's."""


def failing(tries: Sequence[Try]) -> dict[Pair, Failing]:
    """The workers that cannot start, by job, from the seats that ended, oldest first."""
    found: dict[Pair, Failing] = {}
    for one in tries:
        pair = (one.job_id, one.worker)
        if one.joined or one.state in ("finished", "stopped"):
            found.pop(pair, None)
        elif one.state == "failed" and one.ended_ms is not None:
            times = found[pair].times + 1 if pair in found else 1
            left_out_ms = LEFT_OUT_MS[min(times - FAILURES, len(LEFT_OUT_MS) - 1)] if times >= FAILURES else 0
            found[pair] = Failing(times, one.ended_ms + left_out_ms)
    return {pair: streak for pair, streak in found.items() if streak.times >= FAILURES}


def decide_seats(
    demands: Sequence[Demand],
    workers: Sequence[Available],
    held: Sequence[Held],
    past: Sequence[Past] = (),
    out: Collection[Pair] = (),
) -> list[Action]:
    """Compare the seats that jobs want with the workers that are alive.

    Args:
        demands: oldest job first: it is served first.
        workers: those alive; one seat per worker at a time.
        held: every seat that has not ended yet.
        past: the seats that ended in the last minutes: the more of them, the longer the pause.
        out: who gets no seat in which job.
    Returns: seats to close, then seats to issue.
    """
    alive = {worker.id: worker for worker in workers}
    wanted = {demand.job_id: demand for demand in demands}
    closed = [close for seat in held if (close := _close(seat, alive.get(seat.worker), wanted.get(seat.job_id)))]
    gone = {close.seat_id for close in closed}
    kept = [seat for seat in held if seat.id not in gone]
    past = [*past, *(Past(s.id, s.job_id, s.worker, s.state, 0) for s in held if s.id in gone)]
    actions: list[Action] = list(closed)
    free = _free(workers, kept, {seat.id for seat in past})
    for demand in demands:
        mine = [seat for seat in kept if seat.job_id == demand.job_id]
        job_id = demand.job_id
        serving = [w for w in free if demand.queue in w.queues and (job_id, w.id) not in out]
        candidates = [w for w in serving if not _pausing(job_id, w.id, past)]
        if not demand.started and len(mine) + len(candidates) < demand.minimum:
            continue
        chosen = candidates[: max(0, demand.seats - len(mine))]
        numbers = _unused({seat.number for seat in mine}, len(chosen))
        actions += [Issue(demand.job_id, w.id, n) for w, n in zip(chosen, numbers, strict=True)]
        free = [w for w in free if w not in chosen]
    return actions


def _close(seat: Held, worker: Available | None, demand: Demand | None) -> Close | None:
    """Why a seat is over, if it is."""
    if seat.state in ("finished", "failed"):
        return Close(seat.id, seat.state, stop=False)
    if seat.state == "missing":
        return Close(seat.id, "lost", stop=False)
    if worker is None:
        return Close(seat.id, "lost", stop=True)
    if demand is None:
        overdue = seat.stopped_ms is None or seat.stopped_ms > LEAVE_MS
        return Close(seat.id, "stopped", stop=True) if overdue or seat.state == "queued" else None
    if seat.state != "pending" and seat.waiting_ms > STUCK_MS:
        return Close(seat.id, "lost", stop=True)
    return None


def _free(workers: Sequence[Available], kept: Sequence[Held], known: set[str]) -> list[Available]:
    """Workers without a seat; one that still serves a seat nobody knows of is left alone."""
    taken = {seat.worker for seat in kept}
    return [w for w in workers if w.id not in taken and (w.seat is None or w.seat in known)]


def _pausing(job_id: str, worker: str, past: Sequence[Past]) -> bool:
    """Whether this worker's seats in this job end so often that it should wait: 1 s, 2 s, 4 s, ..."""
    mine = (seat for seat in past if seat.job_id == job_id and seat.worker == worker)
    ends = [seat.ended_ms_ago for seat in mine if seat.state in ("finished", "failed")]
    return bool(ends) and min(ends) < min(LONGEST_PAUSE_MS, 500 * 2 ** min(len(ends), 20))


def _unused(taken: set[int], count: int) -> list[int]:
    return [n for n in range(1, len(taken) + count + 1) if n not in taken][:count]


def shortage(
    demand: Demand, workers: Sequence[Available], held: Sequence[Held], out: Mapping[Pair, str] | None = None
) -> str | None:
    """Why a job has too few seats, in words that say what would help; None if it has enough, or soon will.

    Args:
        out: why a worker gets no seat in a job.
    """
    mine = {seat.worker for seat in held if seat.job_id == demand.job_id}
    if len(mine) >= demand.minimum or not demand.seats:
        return None
    busy = Counter(seat.worker for seat in held if seat.job_id != demand.job_id)
    serving = [worker for worker in workers if demand.queue in worker.queues]
    left_out = [why for worker in serving if (why := (out or {}).get((demand.job_id, worker.id)))]
    free = [w for w in serving if not (busy[w.id] or w.id in mine) and (demand.job_id, w.id) not in (out or {})]
    if len(free) + len(mine) >= demand.minimum:
        return None
    online = f"{len(serving)} {'is' if len(serving) == 1 else 'are'} online"
    if taken := sum(bool(busy[worker.id]) for worker in serving):
        online += f", {taken} of them busy with other jobs"
    needs = f"Needs {demand.minimum} worker{'' if demand.minimum == 1 else 's'} on queue {demand.queue}, {online}"
    more = [f"{len(left_out) - SHOWN} more cannot serve it"] if len(left_out) > SHOWN else []
    return "; ".join([needs, *left_out[:SHOWN], *more])
