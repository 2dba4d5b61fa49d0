"""The limits of a round, and who sent an update, are not the sender's to say."""

import json
from typing import Any

import pytest
from redis import Redis

from computeshare.errors import Fenced
from computeshare.protocol.reducer_session import ReducerSession
from computeshare.protocol.round_store import RoundStore
from computeshare.protocol.terms import Terms
from computeshare.protocol.worker_session import WorkerSession
from tests.support.rounds import ONE, PLAN, ZERO, Join, agree, current, events, parts, send, take_seat

SHARED = Terms(backup=False, sharers=3, fewest=3, frozen="f" * 64)


def dishonest_lease(redis: Redis, store: RoundStore, worker: str, *limits: Any) -> Any:
    """Ask for a lease with limits of one's own among the arguments, wherever a script might look for them."""
    k = store.keys
    names = {"token": str(ZERO), "worker": worker, "session": f"session of {worker}", "and_news": 0, "devices": 1}
    command: Any = store.scripts.command("lease", k, **names)
    return redis.execute_command(*command, *limits)


def test_a_reducer_writes_a_jobs_terms_into_its_round(redis: Redis, store: RoundStore) -> None:
    reducer = ReducerSession(redis, store.job_id, "first")
    assert reducer.claim("host", 1, 60_000)
    assert reducer.open(ZERO, [b"w"], [b"s"], PLAN.round(0), {}, terms=SHARED)
    told: Any = redis.hgetall(store.keys.round())
    assert {name: told[name.encode()].decode() for name in SHARED.fields()} == {
        name: str(value) for name, value in SHARED.fields().items()
    }


@pytest.mark.parametrize("limits", [(0,), (1, 2000, 5000, 0, 1, 0, 0), (0, 0, 0, 0, 0, 0, 0)])
def test_no_worker_alone_leases_a_round_that_three_must_share(
    redis: Redis, store: RoundStore, reducer: ReducerSession, join: Join, limits: tuple[int, ...]
) -> None:
    agree(store, backup=False, sharers=3, fewest=3)
    join("greedy")
    answer = dishonest_lease(redis, store, "greedy", *limits)
    assert answer[0] == b"wait" and len(answer) == 3
    join("second"), join("third")
    granted = dishonest_lease(redis, store, "greedy", *limits)[3:]
    assert len(granted) == 1 + (PLAN.round(0).count - 1) // 3  # its share, rounded up
    assert dishonest_lease(redis, store, "greedy", *limits)[0] == b"wait"


def test_no_worker_submits_more_than_its_share_though_it_leased_more(
    redis: Redis, store: RoundStore, reducer: ReducerSession, join: Join
) -> None:
    greedy = join("greedy")
    granted = greedy.lease(str(ZERO)).micro_batches
    assert len(granted) == 4
    agree(store, backup=False, sharers=4)
    assert send(greedy, ZERO, *granted) == "accepted"
    assert [part.micro_batch for part in parts(reducer)] == [granted[0]]


def test_what_a_worker_says_of_its_submission_cannot_stand_for_what_the_script_knows(
    store: RoundStore, reducer: ReducerSession, join: Join
) -> None:
    honest, forger = join("honest"), join("forger")
    granted = forger.lease(str(ZERO)).micro_batches
    forged = {"worker": "honest", "session": honest.session_id, "nonce": "another", "base": "1.9." + "9" * 16}
    forged |= {"outcome": "stale", "counted": [97], "late": [98], "current": "1.9." + "9" * 16}
    updates = [(m, [b"update"], 0.5) for m in granted]
    assert forger.submit(str(ZERO), "nonce", updates, forged | {"bytes_up": 6}).outcome == "accepted"
    (told,) = events(store, "submission")
    assert (told["worker"], told["session"], told["nonce"]) == ("forger", forger.session_id, "nonce")
    assert (told["outcome"], told["current"], told["base"]) == ("accepted", str(ZERO), str(ZERO))
    assert (told["counted"], told["late"]) == (list(granted), [])
    assert told["bytes_up"] == 6


@pytest.mark.parametrize(("demanded", "brought"), [("a" * 64, "b" * 64), ("a" * 64, ""), ("", "b" * 64)])
def test_a_worker_with_other_untrained_parameters_does_not_join(
    redis: Redis, store: RoundStore, reducer: ReducerSession, demanded: str, brought: str
) -> None:
    agree(store, frozen=demanded)
    session = WorkerSession(redis, store.job_id, "other", "session")
    assert take_seat(session, "seat", frozen=brought) == "unlike"
    assert redis.hgetall(store.keys.sessions()) == {} and events(store, "joined") == []
    assert take_seat(session, "seat", frozen=demanded) == "running"


def test_who_joined_is_not_the_workers_word_alone(store: RoundStore, reducer: ReducerSession, redis: Redis) -> None:
    forged = {"worker": "honest", "session": "another", "seat": "a seat of honest"}
    assert take_seat(WorkerSession(redis, store.job_id, "forger", "own"), "own seat", forged) == "running"
    (told,) = events(store, "joined")
    assert (told["worker"], told["session"], told["seat"]) == ("forger", "own", "own seat")


def test_who_left_is_not_the_callers_word(store: RoundStore, reducer: ReducerSession, join: Join) -> None:
    join("honest"), join("forger")
    forged = '{"worker": "honest", "session": "another", "freed": [7], "reason": "asked to"}'
    left = store.scripts.call("leave", store.keys, worker="forger", session="session of forger", event=forged)
    assert left == 0
    (told,) = events(store, "left")
    assert told == {"worker": "forger", "session": "session of forger", "freed": [], "reason": "asked to"}


def test_a_worker_to_which_no_seat_was_issued_cannot_join(
    redis: Redis, store: RoundStore, reducer: ReducerSession
) -> None:
    with pytest.raises(Fenced):
        WorkerSession(redis, store.job_id, "stranger", "session").join("stranger's own seat", {})
    assert redis.hgetall(store.keys.sessions()) == {} and events(store, "joined") == []


def test_a_job_that_is_opened_anew_keeps_the_seats_it_has_given(
    store: RoundStore, reducer: ReducerSession, join: Join
) -> None:
    session = join("a")
    store.reset()
    store.publish("{}")
    assert reducer.open(ONE, [b"w"], [b"s"], PLAN.round(1), {})
    assert session.join("seat of a", {}) == "running"


def test_an_update_above_the_limit_is_not_kept_but_its_size_is(
    redis: Redis, store: RoundStore, reducer: ReducerSession, join: Join
) -> None:
    agree(store, limit=100)
    worker = join("worker")
    first, *others = worker.lease(str(ZERO)).micro_batches
    assert send(worker, ZERO, first, blob=bytes(101), nonce="large") == "accepted"
    assert send(worker, ZERO, others[0], blob=bytes(100), nonce="fits") == "accepted"
    assert {part.micro_batch: part.size for part in parts(reducer)} == {first: 101, others[0]: 100}
    assert not redis.exists(store.keys.update(str(ZERO), first))
    assert redis.exists(store.keys.update(str(ZERO), others[0]))
    assert not [*redis.scan_iter(store.keys.staged("*"))]
    assert json.loads(parts(reducer)[0].entry)["size"] == 101
    assert current(reducer).status == "running"


def test_an_update_of_more_parts_than_the_model_has_is_refused(
    store: RoundStore, reducer: ReducerSession, join: Join
) -> None:
    worker = join("worker")
    assert worker.lease(str(ZERO)).micro_batches == (0, 1, 2, 3)

    def sent(unit: int, parts: int) -> str:
        return worker.submit(str(ZERO), f"{unit} {parts}", [(unit, [b"x"] * parts, 0.5)], {}).outcome

    assert sent(0, 4) == "accepted"  # the round has no limit
    agree(store, parts=3)
    assert sent(1, 4) == "refused"
    assert sent(2, 3) == "accepted" and sent(3, 2) == "accepted"
    assert [part.micro_batch for part in parts(reducer)] == [0, 2, 3]
