"""The weight of a late update."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from computeshare.strategies.staleness import Weighting, weight


@pytest.mark.parametrize(
    ("weighting", "weights"),
    [("constant", [1, 1, 1]), ("inverse", [1, 1 / 2, 1 / 4]), ("inverse_sqrt", [1, 0.5**0.5, 1 / 2])],
)
def test_the_weight_falls_as_the_job_says(weighting: Weighting, weights: list[float]) -> None:
    assert [weight(weighting, late) for late in (0, 1, 3)] == pytest.approx(weights)


@given(st.sampled_from(get_args(Weighting)), st.integers(0, 10**6))
def test_a_fresh_update_counts_in_full_and_a_later_one_never_more(weighting: Weighting, late: int) -> None:
    assert weight(weighting, 0) == 1
    assert 0 < weight(weighting, late + 1) <= weight(weighting, late)


def test_an_update_from_the_future_is_a_bug() -> None:
    with pytest.raises(ValueError, match="2 versions ahead"):
        weight("constant", -2)
