"""How much of a round each worker is leased, and how long the round takes then."""

import heapq
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from computeshare.protocol.lease_policy import (
    TOGETHER_MS,
    TRIED_AGAIN_AFTER,
    Peer,
    is_backed_up,
    lease_share,
    remaining_ms,
    shortest,
)

SLOW = (1000.0, 1000.0, 1000.0, 4000.0)
"""Three equal workers, and one with a quarter of their speed."""


def played(units: int, each: Sequence[float]) -> tuple[float, Counter[int]]:
    """When a round is done that is leased by `share`, and how many units each worker did."""
    left, now = units, 0.0
    asking = [(0.0, worker) for worker in reversed(range(len(each)))]  # the slow one first
    heapq.heapify(asking)
    busy_until: dict[int, float] = {}
    done: Counter[int] = Counter()
    while left:
        now, worker = heapq.heappop(asking)
        others = [Peer(each[o], max(0.0, busy_until.get(o, 0.0) - now)) for o in range(len(each)) if o != worker]
        if granted := lease_share(left, each[worker], others).units:
            left -= granted
            done[worker] += granted
            busy_until[worker] = now + granted * each[worker]
            heapq.heappush(asking, (busy_until[worker], worker))
    return max(busy_until.values()), done


@pytest.mark.parametrize(
    ("units", "rate", "slow_does"), [(4, 2.0, 0), (8, 8 / 3, 0), (13, 3.25, 1), (16, 3.2, 1), (26, 3.25, 2)]
)
def test_a_slow_worker_makes_no_round_longer_and_takes_part_where_that_makes_it_shorter(
    units: int, rate: float, slow_does: int
) -> None:
    """Units per second; the summed speed of the four is 3.25, and no way of sharing whole units out does better."""
    ended_ms, done = played(units, SLOW)
    assert units / ended_ms * 1000 == pytest.approx(rate)
    assert done[3] == slow_does
    assert ended_ms <= played(units, SLOW[:3])[0]


@given(st.integers(1, 40), st.lists(st.integers(1, 50), min_size=1, max_size=6))
def test_a_round_takes_no_longer_than_the_best_way_to_share_it_out(units: int, speeds: list[int]) -> None:
    each = [100.0 * speed for speed in speeds]
    ended_ms, done = played(units, each)
    assert done.total() == units
    assert ended_ms == pytest.approx(shortest(units, each))


def test_short_units_are_leased_together_and_long_ones_one_at_a_time() -> None:
    others = [Peer(10.0)]
    assert lease_share(8, 10.0, others).units == 4
    assert lease_share(8, TOGETHER_MS, [Peer(TOGETHER_MS)]).units == 1
    assert lease_share(10_000, 10.0, []).units == TOGETHER_MS / 10


def test_a_decision_has_its_reason() -> None:
    assert lease_share(0, 10.0, []).reason == "nothing is left"
    assert lease_share(1, 10.0, []).reason == "there is nobody else"
    assert lease_share(1, 10.0, [Peer(10.0)]).reason == "the others would not be done before"
    assert lease_share(1, 10.0, [Peer(9.0)]).reason == "the others will be done before"


def test_one_that_was_passed_over_for_long_is_tried_again() -> None:
    idle_ms = TRIED_AGAIN_AFTER * 4000.0
    assert lease_share(1, 4000.0, [Peer(1000.0)], idle_ms).units == 0
    found = lease_share(1, 4000.0, [Peer(1000.0)], idle_ms + 1)
    assert (found.units, found.reason) == (1, "it may have become faster")


def test_a_worker_that_is_late_is_expected_to_need_as_long_again() -> None:
    assert remaining_ms(2, 1000.0, 500.0) == 1500
    assert remaining_ms(2, 1000.0, 2000.0) == 0
    assert remaining_ms(2, 1000.0, 5000.0) == 3000


def test_a_backup_begins_where_it_is_expected_to_be_done_well_before() -> None:
    assert is_backed_up(1, 1000.0, 2000.0)
    assert not is_backed_up(1, 1000.0, 1500.0)  # of two equal workers, one that is half a unit late
    assert not is_backed_up(1, 1.0, 100.0)  # however fast: the one that has begun is nearly done
    assert not is_backed_up(2, 1000.0, 2000.0)
    assert is_backed_up(1, 1000.0, 1500.0, workers=3)  # the more of them wait, the sooner
    assert not is_backed_up(1, 1000.0, 1000.0, workers=64)


def test_a_worker_with_two_devices_gets_a_unit_for_each_however_slow() -> None:
    assert lease_share(8, 3000.0, [], devices=2).units == 2
    assert lease_share(1, 3000.0, [], devices=2).units == 1
