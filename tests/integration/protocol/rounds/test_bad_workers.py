"""What one worker may do to a job: shares, strikes, bans, and the names in the ledger; against a real server."""

import json

import pytest
from redis import Redis

from computeshare.errors import Banned
from computeshare.protocol.reducer_session import ReducerSession
from computeshare.protocol.round_store import RoundStore
from computeshare.protocol.worker_session import WorkerSession
from computeshare.types import machine_of
from tests.support.rounds import ONE, TWO, ZERO, Join, age, agree, commit, events, free, late, parts, send, take_seat

# Shares


def test_one_worker_gets_no_more_than_its_share_of_a_round(join: Join) -> None:
    alone = join("a", sharers=3)
    assert alone.lease(str(ZERO)).micro_batches == (0, 1)  # of four: ceil(4 / 3)
    assert alone.lease(str(ZERO)).answer == "wait"
    assert send(alone, ZERO, 0, 1) == "accepted"
    assert alone.lease(str(ZERO)).answer == "wait"
    assert join("b", sharers=3).lease(str(ZERO)).micro_batches == (2, 3)


def test_a_worker_that_comes_again_gets_no_second_share(join: Join) -> None:
    first = join("a", "first", sharers=3)
    first.lease(str(ZERO))
    assert send(first, ZERO, 0, 1) == "accepted"
    assert join("a", "second", sharers=3).lease(str(ZERO)).answer == "wait"


def test_a_backup_task_counts_towards_the_share(reducer: ReducerSession, join: Join) -> None:
    slow, quick = join("slow", sharers=3), join("quick", sharers=3)
    slow.lease(str(ZERO)), quick.lease(str(ZERO))
    assert send(quick, ZERO, 2, nonce="half") == "accepted"
    late(reducer)
    assert quick.lease(str(ZERO)).answer == "wait"  # one received, one leased
    assert join("third", sharers=3).lease(str(ZERO)).micro_batches in ((0, 1), (0, 3), (1, 3))


def test_a_lease_that_ran_out_does_not_count_towards_the_share(reducer: ReducerSession, join: Join) -> None:
    session = join("a", sharers=3)
    assert session.lease(str(ZERO)).micro_batches == (0, 1)
    age(reducer, 3_600_000)
    assert session.lease(str(ZERO)).micro_batches == (2, 3)


def test_a_submission_above_the_share_is_not_counted(reducer: ReducerSession, join: Join) -> None:
    session = join("a", sharers=3)
    session.lease(str(ZERO))
    age(reducer, 3_600_000)
    session.lease(str(ZERO))
    assert send(session, ZERO, 0, 1, 2, nonce="more") == "accepted"
    assert sorted(reducer.progress()[1]) == [0, 1]
    assert send(session, ZERO, 2, 3, nonce="still more") == "lease_lost"


def test_the_share_is_of_the_round_at_hand_however_short(reducer: ReducerSession, join: Join) -> None:
    sessions = [join(name, sharers=3) for name in "abc"]
    for token, expected in ((ZERO, [(0, 1), (2, 3), ()]), (ONE, [(4, 5), (6, 7), ()])):
        grants = [session.lease(str(token)).micro_batches for session in sessions]
        assert grants == expected
        for session, grant in zip(sessions, grants, strict=True):
            if grant:
                assert send(session, token, *grant, nonce=f"{token} {grant}") == "accepted"
        if token == ZERO:
            assert commit(reducer, ONE)
    assert commit(reducer, TWO)  # the epoch's last round has two micro-batches: one each
    assert [session.lease(str(TWO)).micro_batches for session in sessions] == [(8,), (9,), ()]


def test_the_ledger_names_the_worker_that_submitted(reducer: ReducerSession, join: Join) -> None:
    session = join("a")
    session.lease(str(ZERO))
    session.submit(str(ZERO), "n", [(0, [b"update"], 0.25), (1, [b"longer update"], float("nan"))], {"worker": "b"})
    received = reducer.progress()[1]
    assert {(part.worker, part.session, part.nonce) for part in received.values()} == {("a", session.session_id, "n")}
    assert (received[0].loss, received[0].size, received[1].size) == (0.25, 6, 13)
    assert received[1].loss != received[1].loss


@pytest.mark.parametrize("loss", [0.1, 2.302585092994046, 1e-300, float("inf"), float("-inf")])
def test_a_loss_arrives_bit_for_bit(reducer: ReducerSession, join: Join, loss: float) -> None:
    session = join("a")
    session.lease(str(ZERO))
    session.submit(str(ZERO), "n", [(0, [b"update"], loss)], {})
    assert abs(reducer.progress()[1][0].loss) == abs(loss)


def test_a_loss_that_is_no_number_is_kept_as_one_that_is_not_finite(reducer: ReducerSession, join: Join) -> None:
    session = join("a")
    session.lease(str(ZERO))
    session.submit(str(ZERO), "n", [(0, [b"update"], '", "worker": "b')], {})  # type: ignore[list-item]
    assert reducer.progress()[1][0].loss != reducer.progress()[1][0].loss


# Strikes


def test_a_submission_is_one_strike_however_many_of_its_micro_batches_are_refused(
    redis: Redis, reducer: ReducerSession, join: Join
) -> None:
    liar = join("liar")
    liar.lease(str(ZERO))
    send(liar, ZERO, 0, 1, 2, 3, nonce="one")
    for part in reducer.progress()[1].values():
        reducer.refuse(ZERO, part, "checksum mismatch", "damaged")
    assert redis.hget(reducer.keys.strikes(), "liar") == b"1"
    liar.lease(str(ZERO))
    send(liar, ZERO, 0, nonce="two")
    reducer.refuse(ZERO, reducer.progress()[1][0], "checksum mismatch", "damaged")
    assert redis.hget(reducer.keys.strikes(), "liar") == b"2"


def test_a_blob_that_the_broker_lost_is_nobodys_strike(redis: Redis, reducer: ReducerSession, join: Join) -> None:
    session = join("a")
    session.lease(str(ZERO))
    send(session, ZERO, 0)
    assert reducer.refuse(ZERO, reducer.progress()[1][0], "the broker has lost the blob", "lost").machines == 0
    assert not redis.exists(reducer.keys.strikes()) and free(reducer) == [b"0"]


def test_the_answer_to_a_refused_submission_is_remembered(redis: Redis, reducer: ReducerSession, join: Join) -> None:
    session = join("a")
    session.lease(str(ZERO))
    send(session, ZERO, 0, nonce="n")
    reducer.refuse(ZERO, reducer.progress()[1][0], "checksum mismatch", "damaged")
    assert b"1|refused" in redis.hvals(reducer.keys.answers())
    assert send(session, ZERO, 0, nonce="n") == "duplicate"


# Bans


def ban(reducer: ReducerSession, worker: str) -> None:
    reducer.redis.hset(reducer.keys.banned(), worker, "for a test")
    reducer.redis.hset(reducer.keys.strikes(), machine_of(worker), 5)
    reducer.redis.hdel(reducer.keys.sessions(), worker)


def test_a_banned_worker_that_asks_for_a_lease_is_told_so(reducer: ReducerSession, join: Join) -> None:
    session = join("liar")
    ban(reducer, "liar")
    with pytest.raises(Banned, match="worker liar is banned"):
        session.lease(str(ZERO))


def test_a_ban_is_lifted_once_and_the_event_says_so(redis: Redis, reducer: ReducerSession, join: Join) -> None:
    assert not reducer.lift_ban("liar")
    ban(reducer, "liar")
    assert reducer.lift_ban("liar") and not reducer.lift_ban("liar")
    assert not redis.exists(reducer.keys.banned(), reducer.keys.strikes())
    assert events(reducer, "unbanned") == [{"worker": "liar"}]
    join("liar")


def test_a_deleted_job_lifts_no_ban(redis: Redis, reducer: ReducerSession) -> None:
    ban(reducer, "liar")
    redis.delete(reducer.keys.spec())
    redis.delete(reducer.keys.events())
    assert not reducer.lift_ban("liar") and not redis.exists(reducer.keys.events())


# Rejoining


def test_a_new_session_tells_what_it_freed_of_the_older_one(
    store: RoundStore, reducer: ReducerSession, join: Join
) -> None:
    join("a", "old").lease(str(ZERO))
    join("a", "new")
    left = {"worker": "a", "session": "old", "reason": "a newer session has taken over"}
    assert events(store, "left") == [left | {"freed": [0, 1, 2, 3]}]
    entries = reducer.redis.xrange(reducer.keys.versions())
    assert entries[-1][1] == {b"freed": b"4"}  # type: ignore[index]
    join("a", "newest")  # held nothing: nothing to tell
    assert len(events(store, "left")) == 1


def test_a_nonce_with_a_quote_in_it_is_kept_as_it_is(reducer: ReducerSession, join: Join) -> None:
    session = join("a")
    session.lease(str(ZERO))
    session.submit(str(ZERO), 'n"', [(0, [b"update"], 0.5)], {})
    raw = reducer.redis.hget(reducer.keys.received(), "0")
    assert isinstance(raw, bytes) and json.loads(raw)["nonce"] == 'n"'


# Several workers of one machine

ONE_MACHINE = ("0badc0de0001", "0badc0de0002")
"""Workers of an invited machine: their ids begin with its id."""


def hold(reducer: ReducerSession, session: WorkerSession, micro_batch: int) -> None:
    """Have the session hold a lease on the micro-batch, since just now."""
    now = int(reducer.now_ms())
    lease = f"{session.session_id}|{now + 60_000}|{now}|{session.worker_id}"
    reducer.redis.lrem(reducer.keys.free(), 0, str(micro_batch))
    reducer.redis.hset(reducer.keys.leases(), str(micro_batch), lease)


def test_the_workers_of_a_machine_have_one_share_together(reducer: ReducerSession, join: Join) -> None:
    first, second = (join(worker, sharers=2) for worker in ONE_MACHINE)
    assert first.lease(str(ZERO)).micro_batches == (0, 1)
    assert second.lease(str(ZERO)).answer == "wait"
    assert send(first, ZERO, 0, 1) == "accepted"
    assert second.lease(str(ZERO)).answer == "wait"
    assert join("other", sharers=2).lease(str(ZERO)).micro_batches == (2, 3)


def test_the_workers_of_a_machine_submit_one_share_together(reducer: ReducerSession, join: Join) -> None:
    first, second = (join(worker) for worker in ONE_MACHINE)
    assert (first.lease(str(ZERO)).micro_batches, second.lease(str(ZERO)).micro_batches) == ((0, 1), (2, 3))
    agree(reducer, sharers=2)
    assert send(first, ZERO, 0, nonce="first") == "accepted"
    assert send(second, ZERO, 2, 3, nonce="second") == "accepted"
    assert [part.micro_batch for part in parts(reducer)] == [0, 2]


def test_a_machine_is_one_of_those_that_must_be_there(store: RoundStore, join: Join) -> None:
    first, _ = (join(worker, sharers=2, fewest=2) for worker in ONE_MACHINE)
    assert first.lease(str(ZERO)).answer == "wait"
    join("other", sharers=2, fewest=2)
    assert first.lease(str(ZERO)).answer == "leased"


def test_where_nobody_is_bad_each_worker_of_a_machine_is_one_that_is_there(store: RoundStore, join: Join) -> None:
    first, _ = (join(worker, fewest=2) for worker in ONE_MACHINE)
    assert first.lease(str(ZERO)).answer == "leased"


def test_a_machine_cannot_confirm_its_own_values_that_are_not_finite(
    redis: Redis, reducer: ReducerSession, join: Join
) -> None:
    first, second, _ = (join(worker) for worker in (*ONE_MACHINE, "other"))
    redis.hset(reducer.keys.round(), "cursor", 1)
    for worker, nonce in ((first, "1"), (second, "2")):
        hold(reducer, worker, 0)
        assert send(worker, ZERO, 0, nonce=nonce) == "accepted"
        found = reducer.refuse(ZERO, reducer.progress()[1][0], "not finite", "not_finite")
        assert (found.machines, found.senders, found.there) == (1, 1, 2)
        assert 0 not in worker.lease(str(ZERO)).micro_batches
    strikes = redis.hgetall(reducer.keys.strikes())
    assert strikes == {machine_of(ONE_MACHINE[0]).encode(): b"2"} and events(reducer, "forgiven") == []


def test_strikes_are_given_taken_back_and_filled_up_by_machine(
    redis: Redis, reducer: ReducerSession, join: Join
) -> None:
    redis.hset(reducer.keys.round(), "cursor", 1)
    for worker, left in ((ONE_MACHINE[0], b"1"), ("feedbeef0001", b"0")):
        join("other"), join("feedbeef0002")
        session = join(worker)
        hold(reducer, session, 0)
        assert send(session, ZERO, 0, nonce=worker) == "accepted"
        reducer.refuse(ZERO, reducer.progress()[1][0], "not finite", "not_finite")
        assert redis.hgetall(reducer.keys.strikes()) == {b"0badc0de": left}
    assert reducer.ban(ZERO, ONE_MACHINE[1], "why")
    assert redis.hgetall(reducer.keys.strikes()) == {b"0badc0de": b"5"}


def test_a_session_that_begins_anew_does_not_confirm_the_one_before(reducer: ReducerSession, join: Join) -> None:
    join("other")
    for name in ("before", "after"):
        session = join("liar", name)
        hold(reducer, session, 0)
        assert send(session, ZERO, 0, nonce=name) == "accepted"
        assert reducer.refuse(ZERO, parts(reducer)[0], "not finite", "not_finite").machines == 1


def test_a_machine_that_is_alone_is_asked_again_for_what_was_not_finite(reducer: ReducerSession, join: Join) -> None:
    first, second = (join(worker) for worker in ONE_MACHINE)
    assert 0 in first.lease(str(ZERO)).micro_batches
    assert send(first, ZERO, 0) == "accepted"
    found = reducer.refuse(ZERO, parts(reducer)[0], "not finite", "not_finite")
    assert found.there == 1 and not reducer.redis.exists(reducer.keys.strikes())
    assert 0 in second.lease(str(ZERO)).micro_batches


def test_a_ban_is_of_the_machine_and_so_is_its_end(redis: Redis, reducer: ReducerSession, join: Join) -> None:
    first, second = ONE_MACHINE
    ban(reducer, first), ban(reducer, "honest")
    other = WorkerSession(redis, reducer.job_id, second, "session")
    assert take_seat(other) == "banned"
    assert reducer.lift_ban(second) and not reducer.lift_ban(first)
    assert redis.hkeys(reducer.keys.banned()) == redis.hkeys(reducer.keys.strikes()) == [b"honest"]
    assert take_seat(other) == "running"
