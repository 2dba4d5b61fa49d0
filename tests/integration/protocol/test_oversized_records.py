"""Records far larger than any that a worker writes, put into the broker past the scripts, are left unparsed."""

import json
from typing import Any

import pytest
from redis import Redis

from api.projection.events.parser import read_event
from computeshare.errors import DamagedRound
from computeshare.protocol import keys
from computeshare.protocol.limits import ENTRY_BYTES, EVENT_BYTES, MEASUREMENT_BYTES, RECORD_BYTES
from computeshare.protocol.reducer_session import ReducerSession
from computeshare.queue import list_workers
from tests.support.rounds import ZERO, Join, parts, send
from tests.support.scheduling_clock import online

ENTRY = {"worker": "a", "session": "s", "nonce": "n", "base": str(ZERO), "loss": 0.5, "size": 6, "at": 1.5}


def test_a_record_of_a_submission_is_as_long_as_a_script_writes_it(reducer: ReducerSession, join: Join) -> None:
    session = join("w" * 32, '"' * 100)
    session.lease(str(ZERO))
    assert send(session, ZERO, 0, nonce='"' * 100) == "accepted"
    assert len(parts(reducer)[0].entry) < ENTRY_BYTES / 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"worker": "a" * ENTRY_BYTES},
        {"worker": 7},
        {"worker": ["a"]},
        {"size": "6"},
        {"size": -1},
        {"size": True},
        {"loss": None},
        {"at": "now"},
        {"more": 1},
    ],
    ids=str,
)
def test_a_record_that_no_script_wrote_makes_the_round_damaged(reducer: ReducerSession, wrong: dict[str, Any]) -> None:
    reducer.redis.hset(reducer.keys.received(), "0", json.dumps(ENTRY | {"loss": 0}))
    assert parts(reducer)[0].worker == "a"
    reducer.redis.hset(reducer.keys.received(), "0", json.dumps(ENTRY | wrong))
    with pytest.raises(DamagedRound, match="what the round has received"):
        reducer.progress()


def test_a_record_of_what_is_no_unit_makes_the_round_damaged(reducer: ReducerSession) -> None:
    reducer.redis.hset(reducer.keys.received(), "zero", json.dumps(ENTRY))
    with pytest.raises(DamagedRound, match="what the round has received"):
        reducer.progress()


def test_measurements_are_those_of_workers_with_a_seat_and_of_bounded_length(reducer: ReducerSession) -> None:
    redis, k = reducer.redis, reducer.keys
    for worker in ("seated", "verbose"):
        redis.hset(k.seats(), worker, f"seat of {worker}")
    measured = {"seated": "{}", "verbose": "x" * (MEASUREMENT_BYTES + 1), "stranger": "{}"}
    redis.mset({k.measured(worker): text for worker, text in measured.items()})
    assert reducer.measured() == {"seated": "{}"}
    redis.set(k.measured("verbose"), "x" * MEASUREMENT_BYTES)
    assert sorted(reducer.measured()) == ["seated", "verbose"]


def test_a_worker_that_describes_itself_at_any_length_is_none(redis: Redis) -> None:
    online(redis, "some", worker="0123456789ab")
    assert "0123456789ab" in [worker.id for worker in list_workers(redis)]
    redis.hset(keys.worker("0123456789ab"), "remark", "x" * RECORD_BYTES)
    assert "0123456789ab" not in [worker.id for worker in list_workers(redis)]


def test_an_event_of_any_length_is_not_parsed() -> None:
    text = json.dumps({"reason": "x" * EVENT_BYTES}).encode()
    with pytest.raises(ValueError, match="an event of 1000014 bytes"):
        read_event(b"1-1", {b"type": b"left", b"at": b"1", b"data": text})
