"""Combining a round's updates: weighted by samples, in order, robust where asked for."""

import numpy as np
import pytest

from computeshare.strategies.averages import Mean, huber, mean, opposed
from computeshare.strategies.base import Contributions
from computeshare.strategies.buffered_async import AsyncStrategy
from computeshare.strategies.local import LocalStrategy
from computeshare.strategies.staleness import Weighting
from computeshare.strategies.sync import SyncStrategy

RNG = np.random.default_rng(0)
UPDATES = [RNG.normal(size=50).astype(np.float32) for _ in range(5)]


def test_the_mean_is_weighted_by_samples() -> None:
    got = SyncStrategy().gradient([np.float32([1]), np.float32([4])], Contributions([2, 1]))
    assert got == pytest.approx([2.0])


def test_the_mean_of_micro_batches_is_the_gradient_of_the_whole_batch() -> None:
    got = mean(UPDATES, [32] * 5)
    assert got == pytest.approx(np.mean(UPDATES, axis=0), abs=1e-6)


def test_the_mean_leaves_its_inputs_alone() -> None:
    before = [update.copy() for update in UPDATES]
    mean(UPDATES, [3] * 5)
    assert all(np.array_equal(a, b) for a, b in zip(before, UPDATES, strict=True))


@pytest.mark.parametrize("combine", ["median", "trimmed_mean"])
def test_robust_combinations_shrug_off_one_liar(combine: str) -> None:
    lies = [*UPDATES[:4], UPDATES[4] * -1000]
    strategy = SyncStrategy.model_validate({"combine": combine})
    honest = np.stack(UPDATES[:4])
    got = strategy.gradient(lies, Contributions([32] * 5))
    assert (got >= honest.min(axis=0)).all() and (got <= honest.max(axis=0)).all()


def test_the_plain_mean_does_not() -> None:
    lies = [*UPDATES[:4], UPDATES[4] * -1000]
    assert np.abs(SyncStrategy().gradient(lies, Contributions([32] * 5))).max() > 100


def test_max_norm_clips_each_update_and_keeps_its_direction() -> None:
    update = np.float32([3, 4])
    assert SyncStrategy(max_norm=1).gradient([update], Contributions([1])) == pytest.approx([0.6, 0.8])
    assert np.array_equal(SyncStrategy(max_norm=6).gradient([update], Contributions([1])), update)


HOSTILE = {
    "sign flipped": lambda update, _: -update,
    "a thousandfold": lambda update, _: update * np.float32(1000),
    "replayed": lambda _, other: other,
    "all zeros": lambda update, _: np.zeros_like(update),
    "the largest there is": lambda update, _: np.full_like(update, np.finfo(np.float32).max / 8),
}
SMALLER = [np.abs(RNG.normal(1, 0.2, size=50)).astype(np.float32) for _ in range(6)]  # agree on the direction


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("combine", ["median", "trimmed_mean"])
def test_one_hostile_worker_of_three_cannot_leave_the_honest_range(combine: str, what: str) -> None:
    stale = np.full(50, -5, np.float32)
    lies = [HOSTILE[what](update, stale) for update in SMALLER[:2]]  # its whole share of six
    strategy, honest = SyncStrategy.model_validate({"combine": combine}), np.stack(SMALLER[2:])
    got = strategy.gradient([*lies, *SMALLER[2:]], Contributions([32] * 6, workers=3))
    assert (got >= honest.min(axis=0)).all() and (got <= honest.max(axis=0)).all()


@pytest.mark.parametrize("what", HOSTILE)
def test_the_plain_mean_leaves_the_honest_range(what: str) -> None:
    stale = np.full(50, -5, np.float32)
    lies = [HOSTILE[what](update, stale) for update in SMALLER[:2]]
    honest = np.stack(SMALLER[2:])
    got = SyncStrategy().gradient([*lies, *SMALLER[2:]], Contributions([32] * 6, workers=3))
    assert not ((got >= honest.min(axis=0)) & (got <= honest.max(axis=0))).all()


def test_a_scaled_gradient_weighs_no_more_than_max_norm() -> None:
    honest = [update / np.linalg.norm(update) for update in UPDATES]
    lies = [honest[0] * np.float32(1000), *honest[1:]]
    clipped = SyncStrategy(max_norm=1).gradient(lies, Contributions([32] * 5))
    assert clipped == pytest.approx(mean(honest, [32] * 5), abs=1e-6)


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize(("lying", "workers"), [(2, 5), (1, 3)])
def test_hostile_workers_move_hubers_estimate_by_twice_the_honest_distance_at_most(
    what: str, lying: int, workers: int
) -> None:
    stale, honest = np.full(50, -5, np.float32), np.stack(SMALLER[lying:workers])
    lies = [HOSTILE[what](update, stale) for update in SMALLER[:lying]]
    rows = np.stack([*lies, *honest])
    got = SyncStrategy(combine="huber").gradient(rows, Contributions([32] * workers, workers=workers))
    middle = np.median(rows, axis=0)
    assert (np.abs(got - middle) <= 2 * np.abs(honest - middle).max(axis=0) + 1e-6).all()


def test_hubers_estimate_leaves_out_those_turned_round_and_is_the_mean_of_honest_updates_close_together() -> None:
    honest = [np.float32([10 + step, 20 - step]) for step in (-1, 0, 0.5, 1)]
    turned = np.stack([-honest[2], *honest])
    about, goal = Contributions([1] * 5, workers=5), np.mean(honest, axis=0)
    off = [np.abs(SyncStrategy(combine=one).gradient(turned, about) - goal).max() for one in ("huber", "median")]
    assert off[0] < off[1] / 2
    everybody = [np.float32([10 + step, 20 - step]) for step in (-1, -0.5, 0, 0.5, 1)]
    got = SyncStrategy(combine="huber").gradient(everybody, about)
    assert got == pytest.approx(np.mean(everybody, axis=0))


@pytest.mark.parametrize(("bad", "estimate"), [(0, 4.5 - 4 / 6), (1, 4.5), (2, 5.5)])
def test_hubers_estimate_leaves_out_no_more_than_may_be_bad(bad: int, estimate: float) -> None:
    rows = np.float32([[4], [5], [6], [7], [-1], [-2]])  # the median is 4.5, the median distance 2
    assert huber(rows, bad) == pytest.approx([estimate])


def test_who_points_away_from_most_others_is_found_though_noise_is_larger_than_what_they_agree_on() -> None:
    honest = [np.float32(1) + RNG.normal(0, 2, size=2000).astype(np.float32) for _ in range(4)]
    lie = -(np.float32(1) + RNG.normal(0, 2, size=2000).astype(np.float32))
    assert opposed(np.stack([*honest[:2], lie * np.float32(1e30), *honest[2:]])) == [2]
    assert opposed(np.stack(honest)) == []
    late = [RNG.normal(0, 1, size=2000).astype(np.float32) for _ in range(5)]  # agree on nothing
    assert opposed(np.stack([*honest, late[0]])) == []


def test_the_trimmed_mean_leaves_out_as_many_as_may_be_bad() -> None:
    values = np.float32([[-100], [-90], [1], [2], [3], [4]])
    strategy = SyncStrategy(combine="trimmed_mean")
    assert strategy.gradient(values, Contributions([1] * 6, workers=3)) == pytest.approx([1.5])  # two at each end
    assert strategy.gradient(values, Contributions([1] * 6, workers=1)) == pytest.approx([(-90 + 1 + 2 + 3) / 4])


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8])
def test_the_median_is_numpys_bit_for_bit(count: int) -> None:
    rows = RNG.normal(size=(count, 1000)).astype(np.float32)
    expected = np.median(rows, axis=0).astype(np.float32)
    assert (
        SyncStrategy(combine="median").gradient(list(rows), Contributions([1] * count)).tobytes() == expected.tobytes()
    )


def test_what_is_clipped_or_sorted_is_not_the_callers() -> None:
    before = [update.copy() for update in UPDATES]
    for combine in ("median", "trimmed_mean"):
        SyncStrategy.model_validate({"combine": combine, "max_norm": 0.1}).gradient(UPDATES, Contributions([3] * 5))
    assert all(np.array_equal(a, b) for a, b in zip(before, UPDATES, strict=True))


def test_a_mean_that_is_added_up_has_the_same_bits() -> None:
    total = Mean(sum(range(1, 6)))
    for count, update in enumerate(UPDATES, 1):
        total.add(update, count)
    assert total.value.tobytes() == mean(UPDATES, range(1, 6)).tobytes()


def test_a_round_without_micro_batches_is_a_bug() -> None:
    with pytest.raises(ValueError, match="at least one"):
        mean([], [])


def test_late_updates_count_by_their_weight_over_all_samples() -> None:
    updates = [np.float32([1]), np.float32([4])]
    got = AsyncStrategy(weighting="inverse").gradient(updates, Contributions([2, 1], [0, 3]))
    assert got == pytest.approx([(2 * 1 + 1 * 4 / 4) / 3])
    assert AsyncStrategy().gradient(updates, Contributions([2, 1], [3, 0])) == pytest.approx([(2 * 1 / 2 + 4) / 3])


def test_a_buffer_that_is_all_late_makes_a_shorter_step() -> None:
    fresh, late = (AsyncStrategy().gradient(UPDATES, Contributions([32] * 5, [tau] * 5)) for tau in (0, 3))
    np.testing.assert_allclose(late, fresh / 2, rtol=1e-6)


@pytest.mark.parametrize("weighting", ["constant", "inverse", "inverse_sqrt"])
def test_a_buffer_of_fresh_updates_is_a_synchronous_round_to_the_bit(weighting: Weighting) -> None:
    samples = [32, 32, 7, 32, 1]
    got = AsyncStrategy(weighting=weighting).gradient(UPDATES, Contributions(samples))
    assert got.tobytes() == mean(UPDATES, samples).tobytes()


def test_a_buffer_needs_a_staleness_for_every_update() -> None:
    with pytest.raises(ValueError, match="shorter"):
        AsyncStrategy().gradient(UPDATES, Contributions([32] * 5, [0] * 4))


def test_each_strategy_combines_in_its_own_way() -> None:
    samples, late = [1, 2, 3, 4, 5], [0, 1, 0, 2, 0]
    median = SyncStrategy(combine="median").gradient(UPDATES, Contributions(samples))
    assert np.array_equal(median, np.median(UPDATES, axis=0).astype(np.float32))
    discounted = AsyncStrategy().gradient(UPDATES, Contributions(samples, late))
    assert discounted == pytest.approx(
        sum(u * n / 15 / (1 + t) ** 0.5 for u, n, t in zip(UPDATES, samples, late, strict=True)), abs=1e-6
    )
    assert not np.array_equal(discounted, mean(UPDATES, samples))
    assert np.array_equal(LocalStrategy().gradient(UPDATES, Contributions(samples)), mean(UPDATES, samples))


ROBUST = {
    "local": lambda combine: LocalStrategy.model_validate({"combine": combine}),
    "async": lambda combine: AsyncStrategy.model_validate({"combine": combine, "weighting": "constant"}),
}


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("combine", ["median", "trimmed_mean"])
@pytest.mark.parametrize("kind", ROBUST)
def test_a_colluding_minority_moves_no_strategy_beyond_the_honest_workers(kind: str, combine: str, what: str) -> None:
    stale = np.full(50, -5, np.float32)
    lies = [HOSTILE[what](update, stale) for update in SMALLER[:2]]
    got = ROBUST[kind](combine).gradient([*lies, *SMALLER[2:5]], Contributions([32] * 5, [0] * 5, workers=5))
    honest = np.stack(SMALLER[2:5])
    assert (got >= honest.min(axis=0)).all() and (got <= honest.max(axis=0)).all()


def test_late_updates_are_clipped_and_then_discounted_before_they_are_compared() -> None:
    updates = [np.float32([3, 4]), np.float32([30, 40]), np.float32([0.3, 0.4])]
    strategy = AsyncStrategy(combine="median", max_norm=5, weighting="inverse")
    got = strategy.gradient(updates, Contributions([1] * 3, [0, 1, 0]))
    assert got == pytest.approx([1.5, 2.0])  # of 5, 5 / 2 and 0.5
    mean_of = AsyncStrategy(max_norm=5, weighting="inverse").gradient(updates, Contributions([1] * 3, [0, 1, 0]))
    assert mean_of == pytest.approx([(3 + 1.5 + 0.3) / 3, (4 + 2 + 0.4) / 3])


@pytest.mark.parametrize("combine", ["median", "trimmed_mean"])
def test_buffers_are_combined_as_the_updates_are(combine: str) -> None:
    variances = [np.float32([1, 2]), np.float32([1.1, 2.1]), np.float32([1e30, -1e30])]
    average = SyncStrategy.model_validate({"combine": combine}).average([32] * 3, workers=3)
    shared = np.empty(2, np.float32)
    for each in variances:
        shared[:] = each  # as the reducer decodes all into the same memory
        average.add(shared, 32)
    assert average.value.tolist() == pytest.approx([1.1, 2])
    plain = SyncStrategy().average([32] * 3, workers=3)
    for each in variances:
        plain.add(each, 32)
    assert plain.value[0] > 1e29


def test_each_replica_is_clipped() -> None:
    updates = [np.float32([3, 4]), np.float32([0.3, 0.4])]
    assert LocalStrategy(max_norm=1).gradient(updates, Contributions([1, 1])) == pytest.approx([0.45, 0.6])
