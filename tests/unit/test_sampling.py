"""Micro-batches and rounds: every sample once an epoch, on every machine the same."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from computeshare.sampling import Plan, permutation

PINNED_ORDER = [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
PINNED_SEED = 3291213472928352369

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


def test_the_shared_order_cannot_be_changed_by_accident() -> None:
    with pytest.raises(ValueError, match="read-only"):
        permutation(0, 0, 10)[0] = 1


@given(plans, st.integers(0, 50))
def test_only_an_epochs_last_round_ends_it(plan: Plan, version: int) -> None:
    assert plan.ends_epoch(version) == (plan.round(version + 1).epoch > plan.round(version).epoch)
    if plan.ends_epoch(version):
        assert plan.last_round_count == plan.round(version).count


def test_a_round_with_carried_micro_batches_holds_them_and_its_own() -> None:
    carried = Plan(0, 100, 10, 4).round(1, (3, 1))
    assert (carried.first, carried.count, carried.total, carried.samples) == (4, 4, 6, 60)
    assert carried.units == [1, 3, 4, 5, 6, 7]
