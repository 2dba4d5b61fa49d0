"""Who is there to hold stages, the placement that holds for all of them, and leases that are handed back."""

import json
from typing import Any

import pytest

from computeshare.protocol.reducer_session import ReducerSession
from computeshare.protocol.round_store import RoundStore
from computeshare.protocol.worker_session import WorkerSession
from tests.support.rounds import ZERO, Join, agree, events, know, send, unseen
from tests.support.wait import wait_until

PLAN = '{"chains":[]}'


def tell(
    store: RoundStore,
    session: WorkerSession,
    plan: str = "",
    number: int = 0,
    present: str = "",
    **about: Any,
) -> list[Any]:
    told = store.scripts.call(
        "place",
        store.keys,
        worker=session.worker_id,
        session=session.session_id,
        about=json.dumps(about, separators=(",", ":")),
        number=number,
        present=present,
        plan=plan,
    )
    return [one.decode() if isinstance(one, bytes) else one for one in told]


@pytest.fixture
def both(join: Join) -> tuple[WorkerSession, WorkerSession]:
    return join("one", "a" * 32), join("two", "b" * 32)


HERE = f"one:{'a' * 32} two:{'b' * 32}"


def test_sessions_are_there_from_their_first_word_until_they_leave(
    store: RoundStore, both: tuple[WorkerSession, WorkerSession]
) -> None:
    one, two = both
    status, number, plan, there, entries = tell(store, one, rate=2)
    assert (status, number, plan, there) == ("running", 0, "", f"one:{'a' * 32}")
    *_, there, entries = tell(store, two, rate=3)
    assert there == HERE and [json.loads(one) for one in entries] == [{"rate": 2}, {"rate": 3}]
    two.leave("done")
    assert tell(store, one, rate=4)[3] == f"one:{'a' * 32}"


def test_a_session_whose_connection_has_ended_is_gone_in_a_moment_and_its_leases_are_free(
    store: RoundStore, both: tuple[WorkerSession, WorkerSession]
) -> None:
    one, two = both
    granted = two.lease(str(ZERO)).micro_batches
    with store.redis.pubsub() as connection:
        connection.subscribe(store.keys.here(two.session_id))
        connection.get_message(timeout=5)
        tell(store, two, listens=True)
        unseen(store, "two", 3000)
        assert tell(store, one)[3] == HERE, "its process has not ended"
    wait_until(lambda: not listeners(store, two))
    before = store.redis.xlen(store.keys.versions())
    assert tell(store, one)[3] == f"one:{'a' * 32}"
    assert store.redis.xlen(store.keys.versions()) == before + 1, "waiting workers are woken"
    assert {*one.lease(str(ZERO)).micro_batches} & {*granted}
    assert send(two, ZERO, granted[0]) == "lease_lost", "what it sends late does not count"
    assert tell(store, two, listens=True)[3] == HERE, "it takes part again: it had only lost its connection"


def test_a_session_that_has_just_lost_its_connection_has_time_to_connect_again(
    store: RoundStore, both: tuple[WorkerSession, WorkerSession]
) -> None:
    one, two = both
    tell(store, two, listens=True)
    unseen(store, "two", 100)
    assert tell(store, one)[3] == HERE


def test_members_are_told_of_a_new_placement(store: RoundStore, both: tuple[WorkerSession, WorkerSession]) -> None:
    one, two = both
    with store.redis.pubsub(ignore_subscribe_messages=True) as connection:
        connection.subscribe(store.keys.here(two.session_id))
        connection.get_message(timeout=5)
        tell(store, one), tell(store, two)
        tell(store, one, PLAN, 0, HERE)
        told = connection.get_message(timeout=5)
    assert told and told["data"] == b"placed"


def listeners(store: RoundStore, session: WorkerSession) -> int:
    ((_, count),) = store.redis.pubsub_numsub(store.keys.here(session.session_id))
    return int(count)


def test_a_session_that_says_nothing_for_long_is_not_there(
    store: RoundStore, both: tuple[WorkerSession, WorkerSession]
) -> None:
    one, two = both
    tell(store, two)
    unseen(store, "two", 4000)
    assert tell(store, one)[3] == HERE
    unseen(store, "two", 6000)
    assert tell(store, one)[3] == f"one:{'a' * 32}"
    assert not store.redis.hexists(store.keys.members(), "two")
    assert tell(store, two)[3] == HERE


def test_a_session_that_a_newer_one_replaced_is_not_there_and_is_told_so(store: RoundStore, join: Join) -> None:
    old = join("one", "a" * 32)
    tell(store, old)
    new = join("one", "c" * 32)
    two = join("two", "b" * 32)
    assert tell(store, two)[3] == f"two:{'b' * 32}"
    assert tell(store, old)[0] == "fenced" and tell(store, two)[3] == f"two:{'b' * 32}"
    assert tell(store, new)[3] == f"one:{'c' * 32} two:{'b' * 32}"


def test_the_first_of_two_placements_for_the_same_sessions_holds(
    store: RoundStore, both: tuple[WorkerSession, WorkerSession]
) -> None:
    one, two = both
    tell(store, one), tell(store, two)
    before = store.redis.xlen(store.keys.versions())
    assert tell(store, one, PLAN, 0, HERE)[1:3] == [1, PLAN]
    assert tell(store, two, '{"chains":[1]}', 0, HERE)[1:3] == [1, PLAN]
    assert store.redis.xlen(store.keys.versions()) == before + 1, "waiting workers are woken"
    assert [event["number"] for event in events(store, "placed")] == [1]
    assert tell(store, two, '{"chains":[2]}', 1, HERE)[1:3] == [2, '{"chains":[2]}']
    assert events(store, "placed")[-1] == {"number": 2, "chains": [2]}


def test_a_placement_for_other_sessions_than_are_there_is_not_stored(
    store: RoundStore, both: tuple[WorkerSession, WorkerSession]
) -> None:
    one, two = both
    tell(store, one), tell(store, two)
    two.leave("done")
    assert tell(store, one, PLAN, 0, HERE)[1] == 0
    assert events(store, "placed") == []


def test_what_is_no_object_is_refused(store: RoundStore, both: tuple[WorkerSession, WorkerSession]) -> None:
    one, _ = both
    with pytest.raises(Exception, match="JSON objects"):
        tell(store, one, "[]", 0, f"one:{'a' * 32}")
    assert events(store, "placed") == []


def test_a_job_that_is_not_open_has_no_placement(store: RoundStore, both: tuple[WorkerSession, WorkerSession]) -> None:
    store.redis.unlink(store.keys.round())
    assert tell(store, both[0])[0] == "gone"
    assert not store.redis.exists(store.keys.members())


def test_a_lease_of_a_chain_is_a_single_unit_whatever_the_speeds(store: RoundStore, join: Join) -> None:
    slow, fast = join("slow"), join("fast")
    agree(store, singles=True)
    know(store, slow=100_000.0, fast=1.0)
    assert len(slow.lease(str(ZERO)).micro_batches) == 1
    assert len(fast.lease(str(ZERO)).micro_batches) == 1


def test_leases_that_are_handed_back_go_to_others_at_once(
    store: RoundStore, reducer: ReducerSession, both: tuple[WorkerSession, WorkerSession]
) -> None:
    one, two = both
    granted = one.lease(str(ZERO)).micro_batches
    others = two.lease(str(ZERO)).micro_batches
    assert granted and others
    before = store.redis.xlen(store.keys.versions())
    one.release()
    assert store.redis.xlen(store.keys.versions()) == before + 1, "waiting workers are woken"
    again = two.lease(str(ZERO)).micro_batches
    assert {*again} >= {*granted[:1]} and not {*again} & {*others}
    assert send(two, ZERO, *others) == "accepted"
    two.release()
    assert {*one.lease(str(ZERO)).micro_batches} & {*granted}


def test_some_leases_are_handed_back_and_the_others_kept(store: RoundStore, join: Join) -> None:
    one = join("one")
    know(store, one=1.0)
    kept, *others = one.lease(str(ZERO)).micro_batches
    assert others
    one.release(others)
    assert {int(unit) for unit in store.redis.hkeys(store.keys.leases())} == {kept}
    assert send(one, ZERO, kept) == "accepted"


def test_a_session_that_was_replaced_hands_nothing_back(store: RoundStore, join: Join) -> None:
    old = join("one", "old")
    new = join("one", "new")
    granted = new.lease(str(ZERO)).micro_batches
    old.release()
    held = store.redis.hkeys(store.keys.leases())
    assert {int(unit) for unit in held} == {*granted}
