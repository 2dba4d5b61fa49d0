"""Units that begin while their version is on its way: the trajectories are those of the definition."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from computeshare.errors import Interrupted
from computeshare.jobspec.sampling_plan import Plan
from computeshare.tensors.layout import Layout, Weights
from computeshare.training.work_units import Update
from computeshare.types import Vector
from computeshare.worker.seat.overlap.overlapped_replica import OverlappedReplica

LAYOUT = Layout.build(iter([("w", (3,), "parameter"), ("b", (1,), "buffer"), ("n", (), "counter")]))
PLAN = Plan(seed=1, samples=27, micro_batch=2, micro_batches_per_round=10, inner_steps=5)
"""Fourteen micro-batches, the last of one sample: units of 5 and 5 in the first round, of 4 in the second."""
OVERLAP = 2


def weights(value: float) -> Weights:
    return Weights(np.full(3, value, np.float32), np.full(1, 10 * value, np.float32), np.array([int(value)]))


def step(values: Vector, micro_batch: int) -> Vector:
    stepped: Vector = values * np.float32(0.5) + np.float32(micro_batch)
    return stepped


class Halving:
    """Each step halves the parameters and adds the micro-batch's number to them; it adds 1 to the buffers."""

    compilation: Any = None
    room = None

    def __init__(self) -> None:
        self.kept, self._loaded = self, weights(0)
        self.taken: list[int] = []
        """The micro-batches of all steps, as a kept inner state has them."""

    def load(self, loaded: Weights) -> None:
        self._loaded = loaded.copy()

    def prefetch(self, micro_batches: object) -> None: ...
    def dump(self) -> None: ...
    def restore(self, state: object) -> None: ...

    def compute(self, unit: int, goes_on: Callable[[], bool] = lambda: True, take: object = None) -> Update:
        raise AssertionError("whole units are not asked for")

    def steps(self, unit: int, part: slice, goes_on: Callable[[], bool]) -> Update:
        micro_batches, values = PLAN.micro_batches(unit)[part], self._loaded.parameters
        assert len(micro_batches), "no replica takes no step"
        for micro_batch in micro_batches:
            values = step(values, micro_batch)
            self.taken.append(micro_batch)
        sizes = [PLAN.size(one) for one in micro_batches]
        loss = float(np.average(micro_batches, weights=sizes))
        return Update(self._loaded.parameters - values, self._loaded.buffers + len(micro_batches), loss)


@dataclass
class Versions:
    """Gives version n, whose parameters are all 100 n."""

    asked: list[int]

    def __call__(self, version: int, load: Callable[[Weights], object], goes_on: Callable[[], bool]) -> None:
        self.asked.append(version)
        if not goes_on():
            raise Interrupted("called off")
        load(weights(100.0 * version))


def trajectory(begin: Vector, version: float, micro_batches: Sequence[int], first: int) -> Vector:
    """Where a unit ends, by the definition."""
    at = begin
    for micro_batch in micro_batches[:first]:
        at = step(at, micro_batch)
    at = np.float32(version) + (at - begin)
    for micro_batch in micro_batches[first:]:
        at = step(at, micro_batch)
    return at


def test_a_unit_begins_where_the_last_ended_and_goes_over_to_its_rounds_version() -> None:
    versions = Versions([])
    replica = OverlappedReplica(Halving(), OVERLAP, PLAN, LAYOUT, versions)
    replica.load(weights(7))
    begin = np.full(3, 7, np.float32)
    for unit, version in [(0, 0), (2, 1), (3, 2), (4, 2)]:
        micro_batches = PLAN.micro_batches(unit)
        update = replica.compute(unit)
        end = trajectory(begin, 100.0 * version, micro_batches, OVERLAP)
        np.testing.assert_allclose(update.vector, 100.0 * version - end, rtol=1e-6)
        assert update.buffers == 1000.0 * version + len(micro_batches) - OVERLAP
        sizes = [PLAN.size(one) for one in micro_batches]
        assert update.loss == pytest.approx(np.average(micro_batches, weights=sizes))
        begin = end
        replica.load(weights(50))  # it has an end of its own to go on from
    assert versions.asked == [0, 1, 2, 2]


def test_a_replica_that_was_away_begins_with_the_weights_loaded_last() -> None:
    replica = OverlappedReplica(Halving(), OVERLAP, PLAN, LAYOUT, Versions([]))
    replica.load(weights(0))
    replica.compute(0)
    replica.load(weights(9))
    update = replica.compute(5)  # of the fourth round
    end = trajectory(np.full(3, 9, np.float32), 300.0, PLAN.micro_batches(5), OVERLAP)
    np.testing.assert_allclose(update.vector, 300.0 - end, rtol=1e-6)


def test_a_short_unit_takes_at_least_its_last_step_from_its_rounds_version() -> None:
    plan = Plan(seed=1, samples=22, micro_batch=2, micro_batches_per_round=10, inner_steps=5)
    micro_batches = plan.micro_batches(2)
    assert len(micro_batches) == 1
    replica = OverlappedReplica(Halving(), OVERLAP, plan, LAYOUT, Versions([]))
    replica.load(weights(0))
    taken: list[tuple[int, float]] = []
    update = replica.compute(2, take=lambda bucket, values: taken.append((bucket, values[0])))
    end = trajectory(np.zeros(3, np.float32), 100.0, micro_batches, 0)
    np.testing.assert_allclose(update.vector, 100.0 - end, rtol=1e-6)
    assert taken == [(0, update.vector[0])]


def test_a_unit_that_is_called_off_in_between_takes_no_step_twice_when_it_is_computed_again() -> None:
    halving = Halving()
    whole, broken = (OverlappedReplica(one, OVERLAP, PLAN, LAYOUT, Versions([])) for one in (Halving(), halving))
    for replica in (whole, broken):
        replica.load(weights(7))
        replica.compute(0)
    with pytest.raises(Interrupted):
        broken.compute(2, goes_on=lambda: False)
    broken.load(weights(8))  # the version of its lease, again
    assert np.array_equal(broken.compute(2).vector, whole.compute(2).vector)
    assert halving.taken == [*PLAN.micro_batches(0), *PLAN.micro_batches(2)]
