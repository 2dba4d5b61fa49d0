"""Decides when a round closes, and limits one worker's part of it. Pure: a decision comes with its reason."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

FEWEST_ARRIVALS = 8
"""So many updates must have arrived before a round has a deadline."""


@dataclass(frozen=True, slots=True)
class RoundProgress:
    """A round's progress, by the broker's clock."""

    received: int
    total: int
    waited_ms: float
    deadline_ms: float
    """Milliseconds from the opening until updates have usually arrived; 0 while too few have arrived to know."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to close the round now, and why; `ask_again_ms`: when to decide again, if only time can change it."""

    close: bool
    reason: str
    ask_again_ms: float | None = None


def decide(progress: RoundProgress, quorum: float) -> Decision:
    """Close a round once all updates have arrived or, after the deadline, once a quorum has."""
    enough = needed(progress.total, quorum)
    if progress.received == progress.total:
        return Decision(True, "complete")
    if enough == progress.total:
        return Decision(False, "waits for all of it")
    if not progress.deadline_ms:
        return Decision(False, "too few arrivals for a deadline")
    if progress.waited_ms < progress.deadline_ms:
        return Decision(False, "before the deadline", progress.deadline_ms - progress.waited_ms)
    if progress.received < enough:
        return Decision(False, f"{progress.received} of the {enough} that are needed")
    return Decision(True, f"quorum {progress.received}/{progress.total} at the deadline")


def deadline_ms(arrivals: Sequence[float]) -> float:
    """The milliseconds from a round's opening to its deadline: the median of those that earlier updates took to arrive
    (n,), and four times their median deviation from it (at least a tenth of it, and 5 ms); 0 if these are too few.
    """
    if len(arrivals) < FEWEST_ARRIVALS:
        return 0.0
    middle = statistics.median(arrivals)
    deviation = statistics.median(abs(one - middle) for one in arrivals)
    return middle + 4 * max(deviation, 0.1 * middle, 5)


def needed(total: int, quorum: float) -> int:
    """The least number of micro-batches that is a quorum of `total`, at least one."""
    return max(1, math.ceil(quorum * total - 1e-9))


def tolerated(workers: int) -> int:
    """The most bad workers among `workers` such that the others are a majority; 0 for no workers."""
    return max(0, workers - 1) // 2


def largest_share(total: int, workers: int) -> int:
    """The most micro-batches of a round for one worker, such that `workers` workers can make the whole round."""
    return -(-total // workers)


def bad_values(count: int, workers: int) -> int:
    """The most micro-batches out of `count` that all bad workers together can have made."""
    return tolerated(workers) * largest_share(count, workers)
