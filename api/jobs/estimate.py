"""Estimates a job's speed with one more worker, from the measured speeds of its present workers. Pure.

The model divides a round's units among the workers so that the round ends as early as possible, as `lease.lua` does,
and takes the rest of the round (the wait for the next version, the download of weights) as constant. The upper bound
assumes a new worker as fast as the fastest; the lower bound a worker as slow as the slowest, and a rest that grows in
proportion to the number of workers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from api.text_format import plural
from computeshare.protocol.lease_policy import shortest

_ORDINALS = ("", "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")
ENOUGH_ROUNDS = 5
"""The number of versions that an estimate needs."""


@dataclass(frozen=True, slots=True)
class MeasuredRounds:
    """Recent measurements of a job.

    `unit_s`: each worker's seconds per unit, sending included. `round_s`: seconds from one version to the next.
    `rounds`: versions measured. `units`: units in a round; `unit` is their name. `most`: the job's limit on workers.
    `anyhow`: whether no worker waits for the slowest, because a round takes the first units to arrive, or the size of
    each unit follows its worker's speed. `stages`: into which the model is split; 0: each worker computes whole units.
    """

    unit_s: Sequence[float]
    round_s: float
    rounds: int
    units: int
    most: int
    anyhow: bool = False
    unit: str = "micro-batch"
    stages: int = 0


@dataclass(frozen=True, slots=True)
class MemberEstimate:
    """The estimated speed as a multiple of the present speed; `low` <= `likely` <= `high`."""

    low: float
    likely: float
    high: float


def one_more(measured: MeasuredRounds) -> MemberEstimate | str:
    """The estimated speed with one more worker; or a sentence: why there is no estimate, or why a worker would not
    help.
    """
    if measured.stages:
        most = min(measured.most, measured.stages * measured.units)
        return f"Up to {most} workers hold stages of this model, each fewer layers the more there are; others stand by"
    workers = len(measured.unit_s)
    if not workers or measured.rounds < ENOUGH_ROUNDS or measured.round_s <= 0:
        return "Too early to estimate the effect of another worker"
    if workers >= measured.most:
        return f"This job takes at most {measured.most} worker{'' if measured.most == 1 else 's'} (workers.max)"
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
    """Seconds until workers with these times per unit have done a round's units."""
    if measured.anyhow:
        return measured.units / sum(1 / seconds for seconds in unit_s)
    return shortest(measured.units, unit_s)
