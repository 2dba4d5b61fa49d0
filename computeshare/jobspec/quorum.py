"""When a round closes, and how much of it one worker may make. Pure: numbers in, a decision and its reason out."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a round has got, by the broker's clock."""

    received: int
    total: int
    waited_ms: float
    deadline_ms: float
    """Milliseconds after the opening by which updates usually have arrived; 0 while too few were seen to tell."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to close the round now, and why; `ask_again_ms` is when time alone would change that, if it would."""

    close: bool
    reason: str
    ask_again_ms: float | None = None


def decide(progress: Progress, quorum: float) -> Decision:
    """Close a round once everything arrived or, past the deadline, once a quorum did."""
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


def needed(total: int, quorum: float) -> int:
    """The least number of micro-batches that is a quorum of `total`, at least one."""
    return max(1, math.ceil(quorum * total - 1e-9))


def tolerated(workers: int) -> int:
    """How many of `workers` may be bad while the others are a majority; 0 of none."""
    return max(0, workers - 1) // 2


def largest_share(total: int, workers: int) -> int:
    """The most micro-batches of a round that one worker may make, so that `workers` can make all of it."""
    return -(-total // workers)


def bad_values(count: int, workers: int) -> int:
    """The most micro-batches out of `count` that all the bad workers together can have made."""
    return tolerated(workers) * largest_share(count, workers)
