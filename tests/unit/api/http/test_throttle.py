"""How often an address may try in vain."""

from api.http import throttle
from api.http.throttle import ADDRESSES, REFILL_S, TRIES, Throttle


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def fail(throttle: Throttle, address: str, times: int) -> None:
    for _ in range(times):
        throttle.failed(address)


def test_some_tries_may_fail_at_once_and_then_one_in_a_while() -> None:
    clock = Clock()
    throttle = Throttle(clock)
    fail(throttle, "10.0.0.1", TRIES - 1)
    assert throttle.wait_s("10.0.0.1") == 0
    fail(throttle, "10.0.0.1", 1)
    assert throttle.wait_s("10.0.0.1") == REFILL_S
    clock.now += REFILL_S
    assert throttle.wait_s("10.0.0.1") == 0
    fail(throttle, "10.0.0.1", 50)
    assert throttle.wait_s("10.0.0.1") == REFILL_S  # more than all of them are never missing


def test_an_address_pays_for_itself_alone_and_a_network_of_ipv6_as_one() -> None:
    throttle = Throttle(Clock())
    fail(throttle, "10.0.0.1", TRIES)
    fail(throttle, "2001:db8:1:2::1", TRIES)
    assert throttle.wait_s("10.0.0.2") == throttle.wait_s("2001:db8:1:3::1") == 0
    assert throttle.wait_s("2001:db8:1:2:ffff::7") > 0


def test_memory_is_bounded(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(throttle, "ADDRESSES", 5)
    assert ADDRESSES > 5
    limited = Throttle(Clock())
    for number in range(50):
        limited.failed(f"10.0.0.{number}")
    assert list(limited._failed) == [f"10.0.0.{number}" for number in range(45, 50)]
