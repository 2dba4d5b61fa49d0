"""What is done with a seat before its machine sleeps."""

from collections.abc import Callable
from typing import Any

import pytest
from redis import Redis

from computeshare.host.availability import Minder
from computeshare.worker import sleep_guard
from computeshare.worker.sleep_guard import Sleeper

REDIS = Redis()


class Seats:
    """An RQ worker whose seat does, when it is asked to leave, what the test says."""

    def __init__(self, leaves: Callable[["Seats"], None]) -> None:
        self.current_seat: str | None = "first"
        self.dropped: list[str] = []
        self._leaves = leaves

    def ask_to_leave(self) -> None:
        self._leaves(self)

    def drop_seat(self, reason: str, redis: Redis) -> None:
        assert redis is REDIS
        self.dropped.append(f"{self.current_seat}: {reason}")


def sleeping(seats: Seats, tell: Callable[[], None] = lambda: None) -> Sleeper:
    worker: Any = seats
    return Sleeper(Minder(), lambda: worker, tell, REDIS)


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleep_guard, "BEFORE_SLEEP_S", 0.0)


def test_a_seat_that_does_not_leave_in_time_is_dropped() -> None:
    seats = Seats(lambda _: None)
    sleeping(seats).before()
    assert seats.dropped == ["first: its machine sleeps"]


@pytest.mark.parametrize("then", [None, "second"])
def test_no_other_seat_is_dropped_than_the_one_that_was_there(then: str | None) -> None:
    seats = Seats(lambda seats: setattr(seats, "current_seat", then))
    sleeping(seats).before()
    assert seats.dropped == []


def test_the_seat_is_asked_before_the_broker_is_told() -> None:
    seen: list[str] = []
    seats = Seats(lambda _: seen.append("asked"))
    sleeper = sleeping(seats, lambda: seen.append("told"))
    sleeper.before()
    assert seen[:2] == ["asked", "told"] and sleeper._minder.resting == "its machine sleeps"
    seats.current_seat = None
    sleeper.after()
    assert sleeper._minder.resting == ""
