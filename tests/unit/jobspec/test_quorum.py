"""When a round closes, and how large a share of it is."""

import pytest

from computeshare.jobspec.quorum import (
    RoundProgress,
    bad_values,
    deadline_ms,
    decide,
    largest_share,
    needed,
    tolerated,
)


def progress(received: int, waited_ms: float, deadline_ms: float = 100, total: int = 8) -> RoundProgress:
    return RoundProgress(received, total, waited_ms, deadline_ms)


@pytest.mark.parametrize("quorum", [0.5, 0.75, 1.0])
def test_a_full_round_closes_at_once(quorum: float) -> None:
    assert decide(progress(8, 0), quorum).close


def test_a_round_is_waited_for_until_its_deadline() -> None:
    decision = decide(progress(7, 60), 0.5)
    assert (decision.close, decision.reason, decision.ask_again_ms) == (False, "before the deadline", 40)


def test_a_quorum_closes_a_round_past_its_deadline() -> None:
    decision = decide(progress(6, 100), 0.75)
    assert (decision.close, decision.reason) == (True, "quorum 6/8 at the deadline")


def test_less_than_a_quorum_is_waited_for_however_long() -> None:
    decision = decide(progress(5, 1e9), 0.75)
    assert (decision.close, decision.reason, decision.ask_again_ms) == (False, "5 of the 6 that are needed", None)


def test_without_a_deadline_or_a_quorum_everything_is_waited_for() -> None:
    assert not decide(progress(7, 1e9, deadline_ms=0), 0.5).close
    assert not decide(progress(7, 1e9), 1.0).close


@pytest.mark.parametrize(
    ("arrivals", "expected"),
    [
        ([100.0] * 7, 0),  # too few to tell
        ([100.0] * 8, 140),  # a tenth of the median
        ([20.0] * 8, 40),  # 5 ms
        ([100, 100, 100, 100, 200, 200, 200, 200], 150 + 4 * 50),
        ([0, 90, 95, 100, 110, 130, 150, 9000, 9000], 110 + 4 * 20),
    ],
)
def test_a_deadline_is_the_median_and_four_deviations(arrivals: list[float], expected: float) -> None:
    assert deadline_ms(arrivals) == deadline_ms(arrivals[::-1]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("total", "quorum", "enough"), [(4, 0.75, 3), (4, 0.7, 3), (20, 0.55, 11), (1, 0.5, 1), (3, 0.5, 2), (10, 0.7, 7)]
)
def test_a_quorum_is_rounded_up_and_not_by_an_error_of_floats(total: int, quorum: float, enough: int) -> None:
    assert needed(total, quorum) == enough


def test_shares_of_the_bad_workers() -> None:
    assert [tolerated(n) for n in range(1, 8)] == [0, 0, 1, 1, 2, 2, 3]
    assert [largest_share(total, 3) for total in (1, 3, 4, 6, 7)] == [1, 1, 2, 2, 3]
    assert [bad_values(count, workers) for count, workers in ((6, 3), (4, 3), (10, 5), (4, 2))] == [2, 2, 4, 0]
    assert all(largest_share(total, n) * n >= total for total in range(1, 40) for n in range(1, 10))
