"""Samples per second."""

import pytest

from api.projection.rates import WINDOW_MS, Rate


def steady(every_ms: int, samples: int, count: int) -> Rate:
    rate = Rate()
    for n in range(count):
        rate.add(n * every_ms, samples)
        rate.value(n * every_ms)
    return rate


def test_nothing_and_a_single_step_have_no_rate() -> None:
    assert Rate().value(1000) == 0
    assert steady(100, 128, 1).value(1000) == 0


@pytest.mark.parametrize("every_ms", [20, 100, 2500, 30_000])
def test_steady_steps_have_their_rate_however_long_they_take(every_ms: int) -> None:
    count = 1000
    rate = steady(every_ms, 128, count)
    assert rate.value((count - 1) * every_ms) == pytest.approx(128 * 1000 / every_ms)


def test_only_the_last_ten_seconds_count() -> None:
    rate = steady(100, 1000, 100)
    for n in range(200):
        rate.add(10_000 + n * 100, 10)
    assert rate.value(10_000 + 199 * 100) == pytest.approx(100, rel=0.02)
    assert len(rate.points) <= WINDOW_MS // 100 + 2


def test_a_long_gap_leaves_the_window_with_the_second_step_behind_it() -> None:
    rate = steady(100, 128, 50)
    hour_ms = 3_600_000
    for n in range(3):
        rate.add(hour_ms + n * 100, 128)
    assert rate.value(hour_ms + 200) == pytest.approx(1280)


@pytest.mark.parametrize("every_ms", [100, 30_000])
def test_rate_of_a_stalled_job_falls_to_nothing(every_ms: int) -> None:
    rate = steady(every_ms, 128, 50)
    last_ms = 49 * every_ms
    usual = 128 * 1000 / every_ms
    assert rate.value(last_ms + every_ms) == pytest.approx(usual)  # the next step is not overdue yet
    still_ms = max(WINDOW_MS, 3 * every_ms)
    values = [rate.value(last_ms + wait) for wait in (every_ms, 2 * every_ms, still_ms)]
    assert usual == pytest.approx(values[0]) and values[0] > values[1] > values[2] > 0
    assert rate.value(last_ms + still_ms + 1) == 0
