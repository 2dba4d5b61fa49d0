"""What a reducer reads ahead of its need."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from computeshare.protocol.refusal import Suspicion
from computeshare.reducer.gather import _ReadAhead, _Wanted, is_divergence
from computeshare.types import Message

ONE, TWO, THREE = (_Wanted(bucket, (("token", 0),)) for bucket in range(3))


@pytest.fixture
def helper() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as helper:
        yield helper


class Source:
    """Notes what is read, and by which thread."""

    def __init__(self) -> None:
        self.read: list[tuple[int, bool]] = []
        self.arrived = threading.Event()
        self.fails: set[int] = set()

    def __call__(self, wanted: _Wanted) -> list[Message | None]:
        self.read.append((wanted.bucket, threading.current_thread() is threading.main_thread()))
        if len(self.read) > 1:
            self.arrived.set()
        if wanted.bucket in self.fails:
            raise ConnectionError(f"bucket {wanted.bucket}")
        return [[b"%d" % wanted.bucket]]


def test_what_comes_next_is_read_before_it_is_asked_for(helper: ThreadPoolExecutor) -> None:
    source = Source()
    ahead = _ReadAhead(source, helper)
    assert ahead.take(ONE, TWO) == [[b"0"]]
    assert source.arrived.wait(10)
    assert source.read == [(0, True), (1, False)]
    assert ahead.take(TWO, None) == [[b"1"]]
    assert len(source.read) == 2


def test_what_nobody_asks_for_is_done_with_before_another_is_read(helper: ThreadPoolExecutor) -> None:
    source = Source()
    ahead = _ReadAhead(source, helper)
    ahead.take(ONE, TWO)
    assert ahead.take(THREE, None) == [[b"2"]]
    assert source.read == [(0, True), (1, False), (2, True)]


def test_an_error_in_reading_ahead_is_raised_to_who_asks(helper: ThreadPoolExecutor) -> None:
    source = Source()
    source.fails = {1}
    ahead = _ReadAhead(source, helper)
    ahead.take(ONE, TWO)
    with pytest.raises(ConnectionError, match="bucket 1"):
        ahead.take(TWO, THREE)
    assert ahead.take(THREE, None) == [[b"2"]]


def test_an_error_in_what_nobody_asks_for_is_nobodys(helper: ThreadPoolExecutor) -> None:
    source = Source()
    source.fails = {1}
    ahead = _ReadAhead(source, helper)
    ahead.take(ONE, TWO)
    ahead.settle()
    assert ahead.take(ONE, None) == [[b"0"]]


@pytest.mark.parametrize(
    ("machines", "times", "senders", "there", "tolerated", "expected"),
    [
        (1, 3, 1, 1, 0, True),  # nobody else is there to ask
        (1, 2, 1, 1, 0, False),
        (1, 9, 1, 2, 0, False),
        (2, 2, 2, 3, 0, True),
        (2, 2, 2, 5, 2, False),  # as many as may be bad, who may have agreed to say so
        (1, 1, 3, 5, 2, True),
        (1, 1, 2, 3, 1, True),
    ],
)
def test_values_that_are_not_finite_are_divergence_if_no_bad_minority_can_have_sent_them(
    machines: int, times: int, senders: int, there: int, tolerated: int, expected: bool
) -> None:
    assert is_divergence(Suspicion(machines, times, senders, there), tolerated) == expected
