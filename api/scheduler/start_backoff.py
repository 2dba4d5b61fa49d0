"""Backoff for workers whose seats in a job keep failing before they join: when to try again. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from api.scheduler.seat_planner import Pair

FAILURES = 5
"""The number of seats that failed in a row, without joining, after which a worker is left out of a job for a while."""
NAMED = 2
"""The number of such failures after which the job's reason names the worker: one alone may be chance."""
LEFT_OUT_MS = (10_000, 30_000, 60_000, 120_000, 300_000, 600_000)
"""How long a worker that cannot start is left out of the job, after that failure and after each further failure."""


@dataclass(frozen=True, slots=True)
class SeatTry:
    """A seat that ended, or the seat with which its worker last joined the job (`ended_ms` is None while open)."""

    job_id: str
    worker: str
    state: str
    joined: bool
    ended_ms: int | None


@dataclass(frozen=True, slots=True)
class Failing:
    """A worker that cannot start in a job: the failures in a row, and until when the worker is left out, if it is."""

    times: int
    until_ms: int


def failing(tries: Sequence[SeatTry]) -> dict[Pair, Failing]:
    """The workers that cannot start, by job and worker; `tries` are ordered oldest first."""
    found: dict[Pair, Failing] = {}
    for one in tries:
        pair = (one.job_id, one.worker)
        if one.joined or one.state in ("finished", "stopped"):
            found.pop(pair, None)
        elif one.state == "failed" and one.ended_ms is not None:
            times = found[pair].times + 1 if pair in found else 1
            left_out_ms = LEFT_OUT_MS[min(times - FAILURES, len(LEFT_OUT_MS) - 1)] if times >= FAILURES else 0
            found[pair] = Failing(times, one.ended_ms + left_out_ms)
    return {pair: streak for pair, streak in found.items() if streak.times >= NAMED}
