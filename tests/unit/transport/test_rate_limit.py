"""Rates as people write them, and the token bucket that keeps to one."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from computeshare.errors import SettingsError
from computeshare.transport.rate_limit import SLOWEST, Pacer, parse_rate


class Clock:
    """Seconds, in the test's hands."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("text", "rate"),
    [("5mbit", 5e6), ("800kbit", 8e5), ("1.5Mbit/s", 1.5e6), (" 64 kbit ", 64e3), ("1gbitps", 1e9), (".5mbit", 5e5)],
)
def test_rates_are_read_as_people_write_them(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    "text", ["", "5", "5mb", "5MB/s", "1Gbps", "fast", "-5mbit", "1e3mbit", "5mibit", "nanmbit", "5,5mbit"]
)
def test_what_is_no_rate_is_refused_with_how_to_write_one(text: str) -> None:
    with pytest.raises(SettingsError, match="for example 5mbit, 800kbit"):
        parse_rate(text)


@pytest.mark.parametrize("text", ["0mbit", "63kbit", "8bit"])
def test_a_rate_too_low_to_train_over_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="64kbit or more"):
        parse_rate(text)


@given(
    st.floats(SLOWEST, 1e9),
    st.lists(st.tuples(st.integers(1, 100_000), st.floats(0, 0.5), st.booleans()), min_size=1, max_size=60),
)
def test_no_second_carries_more_than_the_rate_allows(rate: float, asks: list[tuple[int, float, bool]]) -> None:
    clock = Clock()
    pacer = Pacer(rate, clock)
    sent: list[tuple[float, int]] = []
    for wanted, later_s, patient in asks:
        granted, at = pacer.reserve(wanted)
        assert 1 <= granted <= wanted
        sent.append((max(at, clock.now), granted))
        clock.now = (max(at, clock.now) if patient else clock.now) + later_s
    for start, _ in sent:
        within = sum(granted for at, granted in sent if start <= at <= start + 1)
        assert 8 * within <= 1.05 * rate + 8


@given(st.floats(SLOWEST, 1e9))
def test_who_sends_when_allowed_gets_the_whole_rate(rate: float) -> None:
    clock = Clock()
    pacer = Pacer(rate, clock)
    total = 0
    while clock.now < 1002:
        granted, at = pacer.reserve(1 << 30)
        total += granted
        clock.now = max(clock.now, at + 0.004)  # a timer is never on time
    assert total >= 0.99 * 2 * rate / 8


def test_silence_saves_up_no_burst() -> None:
    clock = Clock()
    pacer = Pacer(8e6, clock)
    clock.now += 60
    granted = 0
    while (reserved := pacer.reserve(1 << 30))[1] <= clock.now:
        granted += reserved[0]
    assert granted == 20_000  # 20 ms


def test_threads_that_share_a_pacer_share_its_rate() -> None:
    clock = Clock()
    pacer = Pacer(8e6, clock)
    start = threading.Barrier(3)

    def ask() -> None:
        start.wait(10)
        for _ in range(2000):
            pacer.reserve(100)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert pacer.reserve(100)[1] == pytest.approx(clock.now - 0.02 + 600_100 / 1e6)
