"""Micro-batches and rounds: every sample once an epoch, on every machine the same."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from computeshare.jobspec.sampling_plan import Plan, held_out, parted, permutation

PINNED_ORDER = [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
PINNED_SEED = 3291213472928352369
PINNED_SAMPLE_SEED = 5101418294885197263

plans = st.builds(
    Plan,
    seed=st.integers(0, 2**63 - 1),
    samples=st.integers(1, 500),
    micro_batch=st.integers(1, 70),
    micro_batches_per_round=st.integers(1, 9),
)


@given(plans)
def test_an_epochs_rounds_cover_every_sample_exactly_once(plan: Plan) -> None:
    for epoch in (0, 1):
        rounds = [plan.round(epoch * plan.rounds_per_epoch + i) for i in range(plan.rounds_per_epoch)]
        numbers = [m for r in rounds for m in range(r.first, r.first + r.count)]
        seen = np.concatenate([plan.indices(m) for m in numbers])
        assert sorted(seen) == list(range(plan.samples))
        assert {r.epoch for r in rounds} == {epoch}
        assert sum(r.samples for r in rounds) == plan.samples
        assert [len(plan.indices(m)) for m in numbers] == [plan.size(m) for m in numbers]


@given(plans, st.integers(0, 50))
def test_micro_batches_are_numbered_across_the_job_without_gaps(plan: Plan, version: int) -> None:
    here, following = plan.round(version), plan.round(version + 1)
    assert following.first == here.first + here.count


def test_the_order_differs_between_epochs_and_seeds() -> None:
    orders = [permutation(seed, epoch, 100).tolist() for seed, epoch in [(0, 0), (0, 1), (1, 0)]]
    assert orders[0] != orders[1] and orders[0] != orders[2]


def test_the_order_is_pinned_so_that_machines_of_other_versions_agree() -> None:
    assert permutation(0, 0, 10).tolist() == PINNED_ORDER
    assert Plan(0, 10, 5, 1).generator_seed(3) == PINNED_SEED
    assert Plan(0, 10, 5, 1).sample_seeds(3)[0] == PINNED_SAMPLE_SEED


@given(st.integers(1, 500), st.floats(0, 0.5))
def test_each_sample_either_trains_or_is_held_out(samples: int, fraction: float) -> None:
    training, validating = parted(samples, fraction)
    assert sorted([*training, *validating]) == list(range(samples))
    assert len(validating) == held_out(samples, fraction) == pytest.approx(samples * fraction, abs=0.5)


def test_a_smaller_fraction_holds_out_some_of_a_larger_ones_samples() -> None:
    small, large = (set(parted(1000, fraction)[1].tolist()) for fraction in (0.1, 0.3))
    assert small < large and small != set(range(100))
    assert small != set(permutation(0, 0, 1000)[:100].tolist())


def test_the_shared_order_cannot_be_changed_by_accident() -> None:
    with pytest.raises(ValueError, match="read-only"):
        permutation(0, 0, 10)[0] = 1


@given(plans, st.integers(0, 50))
def test_only_an_epochs_last_round_ends_it(plan: Plan, version: int) -> None:
    assert all(plan.round_of(unit) == version for unit in plan.round(version).units)
    assert plan.ends_epoch(version) == (plan.round(version + 1).epoch > plan.round(version).epoch)
    if plan.ends_epoch(version):
        assert plan.last_round_count == plan.round(version).count


def test_a_round_with_carried_micro_batches_holds_them_and_its_own() -> None:
    carried = Plan(0, 100, 10, 4).round(1, (3, 1))
    assert (carried.first, carried.count, carried.total, carried.samples) == (4, 4, 6, 60)
    assert carried.units == [1, 3, 4, 5, 6, 7]


@st.composite
def local_plans(draw: st.DrawFn) -> Plan:
    steps, replicas = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    samples, size = draw(st.integers(1, 500)), draw(st.integers(1, 40))
    return Plan(draw(st.integers(0, 2**63 - 1)), samples, size, steps * replicas, steps)


@given(local_plans())
def test_every_sample_of_an_epoch_is_in_one_micro_batch_one_unit_and_one_round(plan: Plan) -> None:
    for epoch in (0, 2):
        rounds = [plan.round(epoch * plan.rounds_per_epoch + i) for i in range(plan.rounds_per_epoch)]
        units = [unit for r in rounds for unit in r.units]
        numbers = [m for unit in units for m in plan.micro_batches(unit)]
        before = epoch * plan.micro_batches_per_epoch
        assert numbers == list(range(before, before + plan.micro_batches_per_epoch))
        assert units == list(range(epoch * plan.units_per_epoch, (epoch + 1) * plan.units_per_epoch))
        assert sorted(np.concatenate([plan.indices(m) for m in numbers])) == list(range(plan.samples))
        assert {plan.epoch_of(unit) for unit in units} == {r.epoch for r in rounds} == {epoch}


@given(local_plans())
def test_only_the_last_round_and_the_last_unit_of_an_epoch_are_short(plan: Plan) -> None:
    rounds = [plan.round(version) for version in range(plan.rounds_per_epoch)]
    assert all(r.count == plan.units_per_round for r in rounds[:-1])
    assert 1 <= rounds[-1].count == plan.last_round_count <= plan.units_per_round
    lengths = [len(plan.micro_batches(unit)) for unit in range(plan.units_per_epoch)]
    assert all(length == plan.inner_steps for length in lengths[:-1])
    assert 1 <= lengths[-1] <= plan.inner_steps
    assert plan.ends_epoch(rounds[-1].version) and not any(plan.ends_epoch(r.version) for r in rounds[:-1])


@given(local_plans())
def test_a_units_samples_are_those_of_its_micro_batches(plan: Plan) -> None:
    for unit in range(plan.units_per_epoch, 2 * plan.units_per_epoch):
        assert plan.unit_size(unit) == sum(plan.size(m) for m in plan.micro_batches(unit)) >= 1
    for version in range(plan.rounds_per_epoch):
        r = plan.round(version)
        assert r.samples == sum(plan.unit_size(unit) for unit in r.units)


@given(plans)
def test_a_unit_of_one_step_is_a_micro_batch(plan: Plan) -> None:
    assert (plan.units_per_epoch, plan.units_per_round) == (plan.micro_batches_per_epoch, plan.micro_batches_per_round)
    for unit in range(2 * plan.units_per_epoch):
        assert list(plan.micro_batches(unit)) == [unit]
        assert plan.unit_size(unit) == plan.size(unit)


@given(local_plans())
def test_an_epochs_rounds_are_its_micro_batches_by_steps_by_replicas_each_rounded_up(plan: Plan) -> None:
    units = math.ceil(math.ceil(plan.samples / plan.micro_batch) / plan.inner_steps)
    replicas = plan.micro_batches_per_round // plan.inner_steps
    assert plan.rounds_per_epoch == math.ceil(units / replicas)
