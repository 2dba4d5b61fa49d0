"""Which workers cannot start in which jobs, and for how long they are left out. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from api.scheduler.seat_planner import Pair

FAILURES = 5
"""A worker whose seats in a job failed this often in a row, none of them having joined, cannot start."""
LEFT_OUT_MS = (10_000, 30_000, 60_000, 120_000, 300_000, 600_000)
"""How long such a worker is left out of the job after that failure and each further one."""


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
