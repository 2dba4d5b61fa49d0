"""Samples per second."""

import pytest

from api.services.rates import WINDOW_MS, Rate


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


def test_rate_of_a_stalled_job_falls_steadily() -> None:
    rate = steady(100, 128, 50)
    values = [rate.value(4900 + wait) for wait in (0, 1000, 10_000, 60_000, 600_000)]
    assert values == sorted(values, reverse=True)
    assert values[-1] < 1
