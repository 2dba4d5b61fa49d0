"""Rounds that close without all of their micro-batches, against a real server."""

from dataclasses import replace

import pytest
from redis import Redis

from computeshare.protocol.reducer_session import ReducerSession, StoredStep
from computeshare.protocol.round_store import RoundStore
from computeshare.protocol.worker_session import WorkerSession
from tests.support.rounds import (
    ONE,
    PLAN,
    THREE,
    TWO,
    ZERO,
    Join,
    commit,
    current,
    events,
    fill,
    free,
    know,
    late,
    of,
    parts,
    send,
    take_seat,
)


@pytest.fixture
def slow(reducer: ReducerSession, join: Join) -> WorkerSession:
    """Holds the lease on the round's first two micro-batches, while the other two have been received."""
    slow, quick = join("slow"), join("quick", backup=False)
    assert slow.lease(str(ZERO)).micro_batches == (0, 1)
    assert quick.lease(str(ZERO)).micro_batches == (2, 3)
    assert send(quick, ZERO, 2, 3, nonce="quick") == "accepted"
    return slow


def test_a_round_closes_once_enough_is_there_and_then_takes_no_more(
    reducer: ReducerSession, slow: WorkerSession
) -> None:
    assert not reducer.close(ZERO, 3) and not current(reducer).closed
    assert reducer.close(ZERO, 2) and current(reducer).closed
    assert send(slow, ZERO, 0, 1) == "lease_lost"
    assert sorted(reducer.progress()[1]) == [2, 3]
    assert events(reducer, "closed") == [{"version": 0, "received": 2, "total": 4}]
    assert not reducer.close(ZERO, 2)
    assert len(events(reducer, "closed")) == 1


def test_what_a_closed_round_has_received_is_a_duplicate_still(
    reducer: ReducerSession, slow: WorkerSession, join: Join
) -> None:
    late(reducer)
    backup = join("backup", backup=True)
    assert backup.lease(str(ZERO)).micro_batches == (0, 1)
    assert send(backup, ZERO, 0, nonce="backup") == "accepted"
    assert reducer.close(ZERO, 3)
    assert send(slow, ZERO, 0, nonce="late") == "duplicate"


def test_a_closed_round_gives_no_lease(reducer: ReducerSession, slow: WorkerSession, join: Join) -> None:
    assert reducer.close(ZERO, 2)
    slow.leave("gone")
    late(reducer)
    grant = join("other").lease(str(ZERO))
    assert (grant.answer, grant.micro_batches) == ("wait", ())


def test_only_the_active_reducer_closes_the_current_round(
    redis: Redis, reducer: ReducerSession, slow: WorkerSession
) -> None:
    assert not reducer.close(ONE, 2)
    assert reducer.renew(0)
    other = ReducerSession(redis, reducer.job_id, "other")
    assert other.claim("host", 2, 60_000)
    assert not reducer.close(ZERO, 2)
    assert other.close(ZERO, 2)


def test_a_paused_round_is_not_closed(store: RoundStore, reducer: ReducerSession, slow: WorkerSession) -> None:
    store.pause()
    assert not reducer.close(ZERO, 2)


def test_a_refusal_opens_a_closed_round_so_that_the_rest_can_come(reducer: ReducerSession, slow: WorkerSession) -> None:
    assert reducer.close(ZERO, 2)
    reducer.refuse(ZERO, reducer.progress()[1][2], "checksum mismatch", "damaged")
    assert not current(reducer).closed
    assert send(slow, ZERO, 0, 1) == "accepted"
    know(reducer, slow=1, quick=1)
    assert slow.lease(str(ZERO)).micro_batches == (2,)


def test_what_is_missing_comes_first_in_the_next_round(
    reducer: ReducerSession, slow: WorkerSession, join: Join
) -> None:
    assert reducer.close(ZERO, 2) and commit(reducer, ONE, carried=(0, 1))
    state = current(reducer)
    assert (state.carried, state.first, state.count, state.total, state.closed) == ((0, 1), 4, 4, 6, False)
    assert state.units == [0, 1, 4, 5, 6, 7]
    assert free(reducer) == [b"0", b"1"]
    slow.leave("gone")
    assert join("quick").lease(str(ONE)).micro_batches == (0, 1, 4, 5, 6, 7)


def test_a_round_with_carried_micro_batches_is_full_with_all_of_them(
    redis: Redis, reducer: ReducerSession, slow: WorkerSession, join: Join
) -> None:
    assert reducer.close(ZERO, 2) and commit(reducer, ONE, carried=(0, 1))
    slow.leave("gone")
    quick = join("quick")
    quick.lease(str(ONE))
    assert send(quick, ONE, 4, 5, 6, 7, nonce="fresh") == "accepted"
    assert redis.llen(reducer.keys.full()) == 0
    assert send(quick, ONE, 0, 1, nonce="carried") == "accepted"
    assert redis.llen(reducer.keys.full()) == 1
    assert reducer.close(ONE, 6) and events(reducer, "closed")[-1] == {"version": 1, "received": 6, "total": 6}
    assert commit(reducer, TWO) and current(reducer).carried == ()


def test_a_round_with_carried_micro_batches_is_shared_out_with_them(
    reducer: ReducerSession, slow: WorkerSession, join: Join
) -> None:
    assert reducer.close(ZERO, 2) and commit(reducer, ONE, carried=(0, 1))
    assert slow.lease(str(ONE)).micro_batches == (0, 1, 4)
    given = join("quick").lease(str(ONE)).micro_batches  # one is left to the other, where that is expected back sooner
    assert given in ((5, 6), (5, 6, 7))


def test_a_late_submission_of_what_was_carried_is_stale(reducer: ReducerSession, slow: WorkerSession) -> None:
    assert reducer.close(ZERO, 2) and commit(reducer, ONE, carried=(0, 1))
    assert slow.lease(str(ONE)).micro_batches[:2] == (0, 1)
    assert send(slow, ZERO, 0, 1) == "stale"
    assert reducer.progress()[1] == {}


def test_the_list_that_made_a_version_is_kept_for_one_who_takes_over(
    reducer: ReducerSession, slow: WorkerSession
) -> None:
    assert reducer.close(ZERO, 2) and commit(reducer, ONE, carried=(0, 1), keep=False)
    assert reducer.steps() == [StoredStep(ZERO, of(ZERO, [2, 3]))]
    assert reducer.updates(of(ZERO, [2, 3]), range(1)) == [[b"update"]] * 2
    assert reducer.store_state(ZERO, of(ZERO, [2, 3]), ONE, [b"state 1"])
    assert reducer.updates(of(ZERO, [2, 3]), range(1)) == [None] * 2


def test_a_version_of_updates_that_the_broker_does_not_hold_is_not_committed(
    reducer: ReducerSession, join: Join
) -> None:
    fill(join, reducer)
    state, read = current(reducer), parts(reducer)
    entry = reducer.redis.hget(reducer.keys.received(), "3")
    assert isinstance(entry, bytes)
    reducer.redis.hdel(reducer.keys.received(), "3")  # it went back to what it was before
    assert not reducer.commit(state, read, ONE, [b"weights"], PLAN.round(1), {})
    reducer.redis.hset(reducer.keys.received(), "3", entry.replace(b"1.0.0000", b"another "))  # then another sent it
    assert not reducer.commit(state, read, ONE, [b"weights"], PLAN.round(1), {})
    assert not reducer.commit(state, read[:3], ONE, [b"weights"], PLAN.round(1), {})
    assert current(reducer).token == ZERO
    reducer.redis.hset(reducer.keys.received(), "3", entry)
    assert reducer.commit(state, read, ONE, [b"weights"], PLAN.round(1), {})


def test_a_version_is_not_committed_on_one_whose_state_the_broker_lost(reducer: ReducerSession, join: Join) -> None:
    fill(join, reducer)
    reducer.redis.delete(reducer.keys.state(str(ZERO)))  # nobody who takes over could repeat the step
    assert not commit(reducer, ONE) and current(reducer).token == ZERO


def test_a_job_is_restored_with_what_its_checkpoint_carried(redis: Redis, store: RoundStore) -> None:
    reducer = ReducerSession(redis, store.job_id, "first")
    assert reducer.claim("host", 1, 60_000)
    assert reducer.open(ONE, [b"weights 1"], [b"state 1"], PLAN.round(1, (1, 3)), {})
    assert current(reducer).units == [1, 3, 4, 5, 6, 7]
    session = WorkerSession(redis, store.job_id, "a", "a")
    assert take_seat(session) == "running"
    assert session.lease(str(ONE)).micro_batches == (1, 3, 4, 5, 6, 7)


def test_only_the_active_reducer_gives_up_the_current_round(redis: Redis, reducer: ReducerSession, join: Join) -> None:
    k = reducer.keys
    session, state = join("a"), current(reducer)
    grant = session.lease(str(ZERO))
    assert send(session, ZERO, *grant.micro_batches[:1]) == "accepted"
    assert not reducer.discard(replace(state, token=ONE))
    assert reducer.renew(0)
    other = ReducerSession(redis, reducer.job_id, "other")
    assert other.claim("host", 2, 60_000)
    assert not reducer.discard(state) and reducer.read() is not None
    assert other.discard(state) and other.read() is None
    assert not redis.exists(k.leases(), k.received(), k.weights(str(ZERO)), k.state(str(ZERO)))
    assert other.open(THREE, [b"w"], [b"s"], PLAN.round(3), {})
