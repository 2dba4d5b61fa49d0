"""How much of a round a worker is leased, by how fast it and the others are. Pure: a decision comes with its reason.

A round ends with its last unit, so a worker gets another one only if the others would not have finished them all by the
time that it is done with it. `lease.lua` decides by the same rules; a test compares the two.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

TOGETHER_MS = 1000.0
"""Units that take a worker no longer than this in all are leased and submitted together: shorter leases would cost
more, in exchanges with the broker, than they gain."""
SHORT_MS = 50.0
"""Units that take a worker less than this are shared out equally: a round of them is over before it matters who is
faster, and whoever asked a moment too late would get none of it."""
TRIED_AGAIN_AFTER = 8
"""A worker that is passed over gets a unit all the same once it has done none for as long as so many would take it: it
may have become faster. Others back it up if it has not."""
EXPECTED_MS = 250.0
"""How long after a round's opening, or its own last unit, a worker that has nothing is still expected to ask for more;
longer if a unit takes it longer. After that the others no longer count on it."""
BACKUP_FACTOR, BACKUP_MS = 1.5, 100.0
"""A backup begins where its worker needs less than the holder, even if it took this many times as long as expected, and
so much longer."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Peer:
    """Another worker of the round: milliseconds it takes for a unit, and until it is done with those it has."""

    unit_ms: float
    busy_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Share:
    """How many units a worker is leased now, and why so many."""

    units: int
    reason: str


def share(left: int, unit_ms: float, others: Sequence[Peer], idle_ms: float = 0.0) -> Share:
    """What a worker that asks for work gets of the `left` units that nobody has, where they take `SHORT_MS` or longer.

    Args:
        unit_ms: how long a unit takes the worker.
        idle_ms: how long ago the worker's last unit was done.
    """
    if not left:
        return Share(0, "nothing is left")
    most = min(left, max(1, math.floor(TOGETHER_MS / unit_ms)))
    units = 0
    while units < most and _is_needed(units + 1, left, unit_ms, others):
        units += 1
    if units:
        return Share(units, "the others would not be done before" if others else "there is nobody else")
    if idle_ms > TRIED_AGAIN_AFTER * unit_ms:
        return Share(1, "it may have become faster")
    return Share(0, "the others will be done before")


def _is_needed(nth: int, left: int, unit_ms: float, others: Sequence[Peer]) -> bool:
    """Whether there is an nth unit left for the worker when it would be done with it, if the others go on meanwhile."""
    done_ms = nth * unit_ms
    by_others = sum(math.ceil((done_ms - o.busy_ms) / o.unit_ms - _ROUNDING) - 1 for o in others if done_ms > o.busy_ms)
    return nth + by_others <= left


def remaining_ms(units: int, unit_ms: float, elapsed_ms: float) -> float:
    """How long a worker is still going to take for what it was leased; one that is late as long again as it is late."""
    return abs(units * unit_ms - elapsed_ms)


def is_backed_up(units: int, unit_ms: float, holder_ms: float) -> bool:
    """Whether a worker with nothing else to do begins a second time what a holder needs `holder_ms` more for."""
    return BACKUP_FACTOR * units * unit_ms + BACKUP_MS < holder_ms


def shortest(units: int, each: Sequence[float]) -> float:
    """The least time in which workers that take so long for `each` unit can do so many."""
    ends = [(one, one) for one in each]
    heapq.heapify(ends)
    ended = 0.0
    for _ in range(units):
        ended, one = heapq.heappop(ends)
        heapq.heappush(ends, (ended + one, one))
    return ended
