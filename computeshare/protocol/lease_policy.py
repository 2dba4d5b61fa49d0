"""How many units of a round to lease to a worker, by its speed and the other workers'. Pure.

A round ends with its last unit, so a worker gets another unit only if the other workers could not finish all remaining
units sooner. `lease.lua` implements the same rules; a test compares the two.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

TOGETHER_MS = 1000.0
"""A lease holds as many units as the worker computes in this time: shorter leases would cost more, in exchanges with
the broker, than they gain."""
SHORT_MS = 50.0
"""Units faster than this are shared out equally: such a round is over before speed matters, and a worker that asks a
moment too late would get no unit."""
TRIED_AGAIN_AFTER = 8
"""A slow worker gets a unit anyway once it has been idle for the time of this many units: it may have become faster. If
not, backups limit the damage."""
EXPECTED_MS = 250.0
"""How long after the round's opening, or its own last unit, an idle worker is still expected to ask for units (or the
time of one of its units, if longer). Later, the policy ignores the worker."""
BACKUP_MARGIN, BACKUP_MS = 0.5, 100.0
"""A backup begins only if the asking worker would finish this share of its own time, and this many milliseconds, before
the holder: both divided by the square root of the number of other workers. A late holder keeps all of them waiting, a
needless backup costs the time of the asking worker alone; but where many ask, one of them soon finds somebody late."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Peer:
    """Another worker of the round: its milliseconds per unit, and milliseconds until its leased units are done."""

    unit_ms: float
    busy_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Share:
    """The number of units to lease to a worker now, and the reason."""

    units: int
    reason: str


def lease_share(left: int, unit_ms: float, others: Sequence[Peer], idle_ms: float = 0.0, devices: int = 1) -> Share:
    """How many of the `left` free units a worker gets when it asks. Applies where units take `SHORT_MS` or longer.

    Args:
        unit_ms: the worker's time per unit.
        idle_ms: time since the worker finished its last unit.
        devices: units that the worker computes at once; `unit_ms` is then its time for all of them, divided by these.
    """
    if not left:
        return Share(0, "nothing is left")
    most = min(left, max(devices, math.floor(TOGETHER_MS / unit_ms)))
    units = 0
    while units < most and _is_needed(units + 1, left, unit_ms, others, devices):
        units += 1
    if units:
        return Share(units, "the others would not be done before" if others else "there is nobody else")
    if idle_ms > TRIED_AGAIN_AFTER * unit_ms:
        return Share(1, "it may have become faster")
    return Share(0, "the others will be done before")


def _is_needed(nth: int, left: int, unit_ms: float, others: Sequence[Peer], devices: int) -> bool:
    """Whether the others would leave an nth unit to the worker, if they work on until it has finished that unit."""
    done_ms = math.ceil(nth / devices) * devices * unit_ms
    by_others = sum(math.ceil((done_ms - o.busy_ms) / o.unit_ms - _ROUNDING) - 1 for o in others if done_ms > o.busy_ms)
    return nth + by_others <= left


def remaining_ms(units: int, unit_ms: float, elapsed_ms: float) -> float:
    """Expected time until a worker finishes its leased units; a late worker is expected to need its delay again."""
    return abs(units * unit_ms - elapsed_ms)


def is_backed_up(units: int, unit_ms: float, holder_ms: float, workers: int = 2) -> bool:
    """Whether an idle worker, of so many in the round, begins a backup of `units` that their holder needs `holder_ms`
    more for.
    """
    own_ms = units * unit_ms
    return own_ms + (BACKUP_MARGIN * own_ms + BACKUP_MS) / math.sqrt(max(1, workers - 1)) < holder_ms


def shortest(units: int, each: Sequence[float]) -> float:
    """The least time in which workers can compute `units` units; `each` is the time per unit of every worker."""
    ends = [(one, one) for one in each]
    heapq.heapify(ends)
    ended = 0.0
    for _ in range(units):
        ended, one = heapq.heappop(ends)
        heapq.heappush(ends, (ended + one, one))
    return ended
