"""When a reducer stores the state of a version, and when it keeps the updates in its place."""

import json

import pytest

from computeshare.protocol.refusal import Received
from computeshare.reducer import recovery
from computeshare.reducer.recovery import StoredState
from computeshare.types import Token

ZERO = Token(1, 0, "0" * 16)


def part(unit: int, size: int) -> Received:
    entry = {"worker": "a", "session": "s", "nonce": "n", "base": str(ZERO), "loss": 0.5, "size": size, "at": 0.0}
    return Received(unit, **entry, entry=json.dumps(entry).encode())  # type: ignore[arg-type]


def versions(parameters: int, size: int, room_bytes: int, units: int = 2) -> int:
    """The number of versions after which the state is stored, made of so many updates of `size` bytes each."""
    stored = StoredState(ZERO)
    for version in range(1, 1000):
        stored.count([part(unit, size) for unit in range(units)])
        if stored.is_outdated(parameters, room_bytes):
            return version
    raise AssertionError("it is never stored")


def test_a_state_is_stored_before_there_is_more_to_repeat_than_a_takeover_has_time_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery, "REPLAYED_VALUES", 120)
    assert versions(10, 1, 10**9) == 4, "a step goes through two updates and the parameters"
    assert versions(10, 1, 10**9, units=11) == 1
    assert versions(50, 1, 10**9) == 1, "a single step may take longer: it always had to be repeated"


def test_a_state_is_stored_before_the_updates_take_more_room_than_they_may() -> None:
    assert versions(10, 5, 40) == 4
    assert versions(10, 5, 49) == 4
    assert versions(10, 50, 40) == versions(10, 5, 0) == versions(10, 0, 0) == 1


def test_large_models_have_their_state_stored_after_each_version() -> None:
    assert [versions(parameters, 1, 10**9) for parameters in (11_181_642, 134_000_000)] == [8, 1]


def test_the_updates_that_take_the_place_of_a_state_are_known_by_base_and_unit() -> None:
    stored = StoredState(ZERO)
    stored.count([part(3, 7), part(4, 8)])
    stored.count([part(5, 9)])
    assert (stored.steps, stored.bytes) == (2, 24)
    assert stored.counted == [(str(ZERO), unit) for unit in (3, 4, 5)]
