"""What one more worker would buy."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.jobs.estimate import MeasuredRounds, MemberEstimate, one_more

TWO = MeasuredRounds(unit_s=[0.1, 0.1], round_s=0.45, rounds=20, units=8, most=8)


def test_another_worker_shortens_what_is_shared_and_not_the_rest() -> None:
    found = one_more(TWO)
    assert isinstance(found, MemberEstimate)
    assert found.likely == pytest.approx(0.45 / 0.35)
    assert found.low <= found.likely <= found.high


def test_unequal_workers_widen_the_range() -> None:
    found = one_more(replace(TWO, unit_s=[0.1, 0.12], round_s=0.55))
    assert isinstance(found, MemberEstimate)
    assert found.low < found.likely <= found.high


def test_where_nobody_waits_for_the_slowest_speeds_add_up() -> None:
    found = one_more(replace(TWO, unit_s=[0.1, 0.3], round_s=8 / (10 + 10 / 3), anyhow=True))
    assert isinstance(found, MemberEstimate)
    assert found.high == pytest.approx((10 + 10 / 3 + 10) / (10 + 10 / 3))


@pytest.mark.parametrize(
    ("measured", "told"),
    [
        (replace(TWO, rounds=2), "Too early"),
        (replace(TWO, unit_s=[]), "Too early"),
        (replace(TWO, most=2), "takes at most 2 workers"),
        (replace(TWO, units=2), "Each round has 2 micro-batches, so a third worker would only be a backup"),
        (replace(TWO, units=2, stages=3, unit_s=[]), "Up to 6 workers hold stages of this model"),
        (replace(TWO, units=4, stages=3), "Up to 8 workers hold stages"),
    ],
    ids=["few rounds", "nobody measured", "full", "nothing to share", "stages", "stages, limited"],
)
def test_what_cannot_be_said_or_gained_is_told(measured: MeasuredRounds, told: str) -> None:
    assert told in str(one_more(measured))


@given(
    st.lists(st.floats(0.001, 10), min_size=1, max_size=6),
    st.floats(0.001, 100),
    st.integers(1, 40),
    st.booleans(),
)
def test_an_estimate_is_a_range_that_holds_the_likely_gain(
    unit_s: list[float], round_s: float, units: int, anyhow: bool
) -> None:
    found = one_more(MeasuredRounds(unit_s, round_s, 20, units, 64, anyhow))
    if isinstance(found, MemberEstimate):
        assert 0 < found.low <= found.likely <= found.high
