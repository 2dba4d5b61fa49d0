"""Rounds divided by how fast the replicas' workers are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from computeshare.strategies.load_balancer import Divider, Walked, divide, paces

OWNERS = st.lists(st.sampled_from("abc"), min_size=1, max_size=9)


@given(OWNERS, st.integers(0, 500), st.dictionaries(st.sampled_from("abc"), st.floats(1e-6, 1e3)))
def test_all_micro_batches_are_divided_and_nobody_goes_without(
    owners: list[str], more: int, pace: dict[str, float]
) -> None:
    sizes = divide(len(owners) + more, owners, pace)
    assert len(sizes) == len(owners) and sum(sizes) == len(owners) + more and min(sizes) >= 1


def test_sizes_follow_the_pace_and_what_one_worker_walks_in_turn_is_shorter() -> None:
    assert divide(42, ["quick", "slow"], {"quick": 4.0, "slow": 1.0}) == (33, 9)
    assert divide(43, ["quick", "slow", "quick"], {"quick": 4.0, "slow": 2.0}) == (15, 14, 14)
    assert divide(7, ["a", "b"], {}) == (4, 3)


def test_a_newcomer_counts_as_the_mean_of_the_others() -> None:
    assert divide(33, ["quick", "slow", "new"], {"quick": 3.0, "slow": 1.0}) == (16, 6, 11)


def test_a_pace_is_what_was_walked_over_the_time_from_lease_to_acceptance() -> None:
    together = [Walked("a", 10, 1000, 1500), Walked("a", 10, 1000, 2000)]
    in_turn = [Walked("b", 10, 1000, 1500), Walked("b", 10, 1600, 2100)]
    assert paces([*together, *in_turn]) == {"a": 20 / 1000, "b": 20 / 1000}
    assert paces([Walked("a", 3, 1000, 999)]) == {"a": 3.0}  # two clocks' rounding


def test_a_round_is_divided_once_all_its_owners_are_known() -> None:
    divider = Divider()
    assert divider.divide(40, 2) == ((), ())
    divider.learn([Walked("quick", 20, 0, 1000), Walked("slow", 20, 0, 4000)])
    assert divider.divide(42, 2) == ((33, 9), ("quick", "slow"))
    assert divider.divide(9, 1) == ((9,), ("quick",))  # an epoch's last round
    assert divider.divide(1, 2) == ((), ())
    assert divider.divide(60, 3) == ((), ())


def test_owners_outlast_a_short_round_and_change_with_who_comes() -> None:
    divider = Divider()
    divider.learn([Walked("a", 5, 0, 1000), Walked("b", 5, 0, 1000)])
    divider.learn([Walked("c", 5, 0, 1000)])
    assert divider.divide(10, 2) == ((5, 5), ("c", "b"))


@pytest.mark.parametrize("overhead", [0, 300])
def test_all_are_done_at_the_same_time_after_a_few_rounds_whatever_a_round_costs_beside_its_steps(
    overhead: float,
) -> None:
    divider, sizes = Divider(), (50, 50, 50)
    for _ in range(12):
        took = [overhead + step * size for step, size in zip((2, 10, 30), sizes, strict=True)]
        divider.learn([Walked(w, n, 0, t) for w, n, t in zip("abc", sizes, took, strict=True)])
        sizes, _ = divider.divide(150, 3)
    assert max(took) < 1.35 * min(took) and max(took) < 0.5 * 30 * 50
