"""How many permits a key has, and when it gets more."""

import pytest

from api.http import throttle
from api.http.throttle import Throttle, network_of

SIZE, REFILL_S = 10, 3.0


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def take(throttle: Throttle, key: str, times: int) -> None:
    for _ in range(times):
        throttle.take(key)


def test_some_permits_may_be_taken_at_once_and_then_one_in_a_while() -> None:
    clock = Clock()
    throttle = Throttle(SIZE, REFILL_S, clock)
    take(throttle, "10.0.0.1", SIZE - 1)
    assert throttle.wait_s("10.0.0.1") == 0
    take(throttle, "10.0.0.1", 1)
    assert throttle.wait_s("10.0.0.1") == REFILL_S
    clock.now += REFILL_S
    assert throttle.wait_s("10.0.0.1") == 0
    take(throttle, "10.0.0.1", 50)
    assert throttle.wait_s("10.0.0.1") == REFILL_S  # more than all of them are never missing


def test_a_permit_that_was_given_back_may_be_taken_again() -> None:
    throttle = Throttle(SIZE, REFILL_S, Clock())
    take(throttle, "a", SIZE)
    throttle.give_back("a")
    assert throttle.wait_s("a") == 0
    for key in ("a", "b"):
        for _ in range(2 * SIZE):
            throttle.give_back(key)  # no key ever has more than all of them
    take(throttle, "a", SIZE)
    assert throttle.wait_s("a") == REFILL_S and list(throttle._taken) == ["a"]


def test_a_key_pays_for_itself_alone() -> None:
    throttle = Throttle(SIZE, REFILL_S, Clock())
    take(throttle, "a", SIZE)
    assert throttle.wait_s("a") > 0 and throttle.wait_s("b") == 0


def test_a_network_of_ipv6_is_one_key() -> None:
    assert network_of("2001:db8:1:2::1") == network_of("2001:db8:1:2:ffff::7") != network_of("2001:db8:1:3::1")
    assert [network_of(address) for address in ("10.0.0.1", "testclient", "")] == ["10.0.0.1", "testclient", ""]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throttle, "KEYS", 5)
    limited = Throttle(SIZE, REFILL_S, Clock())
    for number in range(50):
        limited.take(f"10.0.0.{number}")
    assert list(limited._taken) == [f"10.0.0.{number}" for number in range(45, 50)]
