"""What one more worker would buy, from what those that take part have been measured at. Pure.

A round's work is shared out so that it is done as soon as can be, as `lease.lua` does it. What a round takes beyond
that (the wait for the next version, the weights' way down) is taken to stay as it is; the range says how it would be
with the slowest and with the fastest of the workers there are, and with that remainder a worker's part longer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from api.text_format import plural
from computeshare.protocol.lease_policy import shortest

_ORDINALS = ("", "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")
ENOUGH_ROUNDS = 5
"""Versions that must have been made before anything is said."""


@dataclass(frozen=True, slots=True)
class MeasuredRounds:
    """How a job has gone of late.

    `unit_s`: of each worker, seconds that a unit takes it, sent and all. `round_s`: seconds from one version to the
    next. `units`: in a round, each called a `unit`. `most`: workers that the job takes. `anyhow`: whether a round is
    made of whatever comes first, or of units as long as their workers are fast, so that nobody waits for the slowest.
    """

    unit_s: Sequence[float]
    round_s: float
    rounds: int
    units: int
    most: int
    anyhow: bool = False
    unit: str = "micro-batch"


@dataclass(frozen=True, slots=True)
class MemberEstimate:
    """How many times as fast the job would be; `likely` within `low` to `high`."""

    low: float
    likely: float
    high: float


def one_more(measured: MeasuredRounds) -> MemberEstimate | str:
    """How many times as fast the job would be with one more worker; or why nothing can be said, or nothing gained."""
    workers = len(measured.unit_s)
    if not workers or measured.rounds < ENOUGH_ROUNDS or measured.round_s <= 0:
        return "It is too early to say what one more worker would buy"
    if workers >= measured.most:
        return f"This job takes {measured.most} worker{'' if measured.most == 1 else 's'} at most (workers.max)"
    if workers >= measured.units and not measured.anyhow:
        units = f"{measured.units} {measured.unit if measured.units == 1 else plural(measured.unit)}"
        return f"Each round has {units}, so a {_ordinal(workers + 1)} worker would only be a backup"
    rest_s = max(0.0, measured.round_s - _work_s(measured, measured.unit_s))

    def gain(unit_s: float, longer: float = 1.0) -> float:
        return measured.round_s / (_work_s(measured, [*measured.unit_s, unit_s]) + rest_s * longer)

    likely = gain(median(measured.unit_s))
    low = gain(max(measured.unit_s), (workers + 1) / workers)
    return MemberEstimate(min(low, likely), likely, max(likely, gain(min(measured.unit_s))))


def _ordinal(number: int) -> str:
    if number < len(_ORDINALS):
        return _ORDINALS[number]
    last = number % 10 if number % 100 not in (11, 12, 13) else 0
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(last, 'th') }"


def _work_s(measured: MeasuredRounds, unit_s: Sequence[float]) -> float:
    """Seconds until workers of these speeds have done a round's units."""
    if measured.anyhow:
        return measured.units / sum(1 / seconds for seconds in unit_s)
    return shortest(measured.units, unit_s)
