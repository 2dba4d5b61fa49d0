"""Combining a round's updates: weighted by samples, in order, robust where asked for."""

import numpy as np
import pytest

from computeshare.spec import SyncStrategy
from computeshare.strategies import sync

RNG = np.random.default_rng(0)
UPDATES = [RNG.normal(size=50).astype(np.float32) for _ in range(5)]


def test_the_mean_is_weighted_by_samples() -> None:
    got = sync.combine(SyncStrategy(), [np.float32([1]), np.float32([4])], [2, 1])
    assert got == pytest.approx([2.0])


def test_the_mean_of_micro_batches_is_the_gradient_of_the_whole_batch() -> None:
    got = sync.mean(UPDATES, [32] * 5)
    assert got == pytest.approx(np.mean(UPDATES, axis=0), abs=1e-6)


def test_the_mean_leaves_its_inputs_alone() -> None:
    before = [update.copy() for update in UPDATES]
    sync.mean(UPDATES, [3] * 5)
    assert all(np.array_equal(a, b) for a, b in zip(before, UPDATES, strict=True))


@pytest.mark.parametrize("combine", ["median", "trimmed_mean"])
def test_robust_combinations_shrug_off_one_liar(combine: str) -> None:
    lies = [*UPDATES[:4], UPDATES[4] * -1000]
    strategy = SyncStrategy.model_validate({"combine": combine})
    honest = np.stack(UPDATES[:4])
    got = sync.combine(strategy, lies, [32] * 5)
    assert (got >= honest.min(axis=0)).all() and (got <= honest.max(axis=0)).all()


def test_the_plain_mean_does_not() -> None:
    lies = [*UPDATES[:4], UPDATES[4] * -1000]
    assert np.abs(sync.combine(SyncStrategy(), lies, [32] * 5)).max() > 100


def test_max_norm_clips_each_update_and_keeps_its_direction() -> None:
    update = np.float32([3, 4])
    assert sync.combine(SyncStrategy(max_norm=1), [update], [1]) == pytest.approx([0.6, 0.8])
    assert np.array_equal(sync.combine(SyncStrategy(max_norm=6), [update], [1]), update)


def test_a_round_without_micro_batches_is_a_bug() -> None:
    with pytest.raises(ValueError, match="at least one"):
        sync.mean([], [])
