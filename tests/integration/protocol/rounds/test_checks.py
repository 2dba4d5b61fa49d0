"""Checks of the scripts that others overlap with, or that only a rare order of events needs: a direct test each."""

from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ResponseError

from computeshare.errors import Banned
from computeshare.protocol.limits import LINE_BYTES, NAME_CHARACTERS, WORKER_EVENT_BYTES
from computeshare.protocol.reducer_session import ReducerSession
from computeshare.protocol.refusal import BANNING_STRIKES
from computeshare.protocol.round_store import LINE_BYTES_KEPT, LINES_KEPT, RoundStore
from computeshare.protocol.worker_session import WorkerSession
from tests.support.rounds import (
    GONE,
    ONE,
    PLAN,
    TWO,
    ZERO,
    Join,
    age,
    agree,
    commit,
    current,
    events,
    fill,
    free,
    late,
    of,
    parts,
    send,
    submit_staged,
    take_seat,
)

# Reducers


def test_a_fenced_reducer_announces_nothing(redis: Redis, reducer: ReducerSession) -> None:
    assert reducer.announce("checkpoint", {"by": "first"})
    assert reducer.renew(0) and ReducerSession(redis, reducer.job_id, "other").claim("host", 2, 60_000)
    assert not reducer.announce("checkpoint", {"by": "late"})
    assert events(reducer, "checkpoint") == [{"by": "first"}]


def test_a_log_is_appended_to_a_job_that_is_there_and_keeps_its_newest_lines(redis: Redis, store: RoundStore) -> None:
    name = store.keys.logs()
    assert store.log(["one", "two"])
    assert [fields for _, fields in redis.xrange(name)] == [{b"data": b"one"}, {b"data": b"two"}]  # type: ignore[union-attr, misc]
    for _ in range(60):
        store.log(["line"] * 100)
    assert LINES_KEPT <= redis.xlen(name) < 1.1 * LINES_KEPT
    store.purge()
    assert not store.log(["too late"]) and not redis.exists(name)


def test_a_log_that_nobody_reads_takes_no_more_bytes_than_it_may(redis: Redis, store: RoundStore) -> None:
    for number in range(6):
        assert store.log([*["x" * 10_000] * 99, str(number)])
        taken: Any = redis.memory_usage(store.keys.logs(), samples=0)
        assert taken <= LINE_BYTES_KEPT and (number < 2 or taken > LINE_BYTES_KEPT / 2)
        newest: Any = redis.xrevrange(store.keys.logs(), count=1)
        assert newest[0][1] == {b"data": b"%d" % number}


def test_what_was_published_or_accepted_does_not_expire(redis: Redis, reducer: ReducerSession, join: Join) -> None:
    k = reducer.keys
    session = join("a")
    session.lease(str(ZERO))
    send(session, ZERO, 0, 1, 2, 3)
    kept = [k.weights(str(ZERO)), k.state(str(ZERO)), *(k.update(str(ZERO), m) for m in range(4))]
    assert [redis.ttl(key) for key in kept] == [-1] * 6
    assert commit(reducer, ONE, keep=False)
    reducer.store_state(ZERO, of(ZERO, range(4)), ONE, [b"state 1"])
    assert [redis.ttl(key) for key in (k.weights(str(ONE)), k.state(str(ONE)))] == [-1, -1]


def test_a_commit_clears_everything_that_belonged_to_the_round(
    redis: Redis, reducer: ReducerSession, join: Join
) -> None:
    k = reducer.keys
    state = reducer.read()
    session = join("a")
    session.lease(str(ZERO))
    assert send(session, ZERO, 0) == "accepted"
    for name in (k.leases(), k.backups(), k.suspects()):
        redis.hset(name, "0", "left over")
    redis.rpush(k.free(), "0")
    redis.rpush(k.full(), str(ZERO))
    assert state is not None and reducer.commit(state, parts(reducer), ONE, [b"weights 1"], PLAN.round(1), {})
    names = (k.leases(), k.backups(), k.received(), k.suspects(), k.free(), k.full())
    assert [name for name in names if redis.exists(name)] == []


def test_a_round_that_was_committed_is_not_committed_again_on_its_old_token(
    reducer: ReducerSession, join: Join
) -> None:
    fill(join, reducer)
    old = current(reducer)
    assert commit(reducer, ONE, keep=False)
    assert not reducer.commit(old, [], TWO, [b"weights"], PLAN.round(2), {})  # nothing has been received on either
    assert current(reducer).token == ONE


def test_a_job_that_was_deleted_under_a_reducer_is_not_opened_by_it(redis: Redis, store: RoundStore) -> None:
    reducer = ReducerSession(redis, store.job_id, "first")
    assert reducer.claim("host", 1, 60_000)
    redis.delete(store.keys.spec())  # the first thing a deletion takes; the fence is still there
    assert not reducer.open(ZERO, [b"w"], [b"s"], PLAN.round(0), {})
    assert store.read() is None


# Refusing


def test_a_reducer_that_read_an_older_version_cannot_refuse(reducer: ReducerSession, join: Join) -> None:
    session = join("a")
    session.lease(str(ZERO))
    send(session, ZERO, 0, 1, 2, 3)
    part = reducer.progress()[1][0]
    assert reducer.refuse(ONE, part, "reason", "damaged") == GONE
    assert sorted(reducer.progress()[1]) == [0, 1, 2, 3] and free(reducer) == []


def test_a_micro_batch_is_refused_once(redis: Redis, reducer: ReducerSession, join: Join) -> None:
    session = join("liar")
    session.lease(str(ZERO))
    send(session, ZERO, 0)
    part = reducer.progress()[1][0]
    assert reducer.refuse(ZERO, part, "reason", "damaged").machines == 0
    assert reducer.updates(of(ZERO, [0]), range(1)) == [None]
    assert reducer.refuse(ZERO, part, "again", "damaged") == GONE
    assert free(reducer) == [b"0"] and redis.hget(reducer.keys.strikes(), "liar") == b"1"


def test_a_worker_is_banned_by_its_last_strike_and_not_before(
    redis: Redis, reducer: ReducerSession, join: Join
) -> None:
    liar = join("liar")
    for strike in range(1, BANNING_STRIKES + 1):
        liar.lease(str(ZERO))
        assert send(liar, ZERO, 0, nonce=str(strike)) == "accepted"
        assert redis.hexists(reducer.keys.banned(), "liar") == 0
        reducer.refuse(ZERO, reducer.progress()[1][0], "reason", "damaged")
        age(reducer, 3_600_000)  # what it has leased is free for itself again
    assert send(liar, ZERO, 0, nonce="late") == "fenced"
    assert take_seat(WorkerSession(redis, reducer.job_id, "liar", "new"), "seat of liar") == "banned"
    reducer.lift_ban("liar")
    join("liar", "pardoned")


def test_the_strikes_of_all_workers_of_a_machine_count_together_and_ban_them_all(
    redis: Redis, reducer: ReducerSession, join: Join
) -> None:
    k, honest = reducer.keys, join("machine2work")
    workers = [join(f"machine1{name}") for name in ("one", "two", "three", "four", "five", "idle")]
    for strike, sender in enumerate(workers[:BANNING_STRIKES]):
        assert redis.hlen(k.banned()) == 0
        [unit, *_] = sender.lease(str(ZERO)).micro_batches
        assert send(sender, ZERO, unit, nonce=str(strike)) == "accepted"
        reducer.refuse(ZERO, reducer.progress()[1][unit], "reason", "damaged")
        sender.release()
    assert redis.hgetall(k.strikes()) == {b"machine1": b"5"}
    assert {*redis.hkeys(k.banned())} == {one.worker_id.encode() for one in workers}  # type: ignore[misc]
    assert redis.hkeys(k.sessions()) == [b"machine2work"] and honest.lease(str(ZERO)).answer == "leased"
    for one in workers:
        with pytest.raises(Banned):
            one.lease(str(ZERO))
    assert {event["worker"] for event in events(reducer, "banned")} == {one.worker_id for one in workers}
    assert reducer.lift_ban("machine1idle") and not redis.exists(k.strikes(), k.banned())


def test_a_machine_that_left_before_its_last_strike_is_banned_all_the_same(
    redis: Redis, reducer: ReducerSession, join: Join
) -> None:
    worker = join("machine1work")
    worker.lease(str(ZERO))
    assert send(worker, ZERO, 0) == "accepted"
    worker.leave("done")
    redis.hset(reducer.keys.strikes(), "machine1", BANNING_STRIKES - 1)
    reducer.refuse(ZERO, reducer.progress()[1][0], "reason", "damaged")
    assert redis.hkeys(reducer.keys.banned()) == [b"machine1work"]


# Pausing


def test_only_running_rounds_are_paused_and_only_paused_ones_resumed(reducer: ReducerSession) -> None:
    assert reducer.pause() and not reducer.pause()
    assert reducer.resume() and not reducer.resume()
    reducer.end("cancelled")
    assert not reducer.pause() and not reducer.resume()
    assert reducer.status() == "cancelled"


# Joining and leaving


def test_joining_a_job_that_has_ended_begins_no_session(redis: Redis, reducer: ReducerSession) -> None:
    reducer.end("cancelled")
    assert take_seat(WorkerSession(redis, reducer.job_id, "a", "s")) == "cancelled"
    assert redis.hgetall(reducer.keys.sessions()) == {} and events(reducer, "joined") == []


def test_a_new_session_frees_the_leases_of_its_own_worker_alone(reducer: ReducerSession, join: Join) -> None:
    other, _ = join("b"), join("a", "old")
    assert other.lease(str(ZERO)).micro_batches == (0, 1)
    join("a", "new")
    assert free(reducer) == []
    assert send(other, ZERO, 0, 1) == "accepted"


def test_an_older_session_cannot_end_the_newer_one(reducer: ReducerSession, join: Join) -> None:
    old, new = join("a", "old"), join("a", "new")
    old.leave("late")
    assert new.lease(str(ZERO)).answer == "leased"
    assert events(reducer, "left") == []


def test_leaving_a_deleted_job_brings_no_list_of_it_back(redis: Redis, reducer: ReducerSession, join: Join) -> None:
    session = join("a")
    session.lease(str(ZERO))
    redis.delete(reducer.keys.round())  # a deletion takes the round first and the rest key by key
    session.leave("late")
    assert redis.exists(reducer.keys.free()) == 0


# Leasing


def test_a_freed_micro_batch_that_arrived_meanwhile_is_not_leased_again(store: RoundStore, join: Join) -> None:
    slow, quick = join("slow"), join("quick")
    assert slow.lease(str(ZERO)).micro_batches == (0, 1)
    send(quick, ZERO, *quick.lease(str(ZERO)).micro_batches, nonce="own")
    late(store)
    assert quick.lease(str(ZERO)).micro_batches == (0, 1)
    slow.leave("its leases are free now, though another computes them")
    assert send(quick, ZERO, 0, 1, nonce="backup") == "accepted"
    assert quick.lease(str(ZERO)).answer == "wait"


def test_a_lease_that_has_run_out_is_no_backup_task(redis: Redis, store: RoundStore, join: Join) -> None:
    slow = join("slow")
    agree(store, backup=False)
    patient = WorkerSession(redis, store.job_id, "patient", "patient")
    assert take_seat(patient) == "running"
    assert slow.lease(str(ZERO)).micro_batches == (0, 1)
    send(patient, ZERO, *patient.lease(str(ZERO)).micro_batches)
    age(store, 3_600_000)
    assert patient.lease(str(ZERO)).micro_batches == (0, 1)


def test_rounds_wait_while_too_few_workers_are_there(store: RoundStore, join: Join) -> None:
    one = join("one", fewest=2)
    assert one.lease(str(ZERO)).answer == "wait"
    other = join("other", fewest=2)
    assert one.lease(str(ZERO)).answer == other.lease(str(ZERO)).answer == "leased"
    store.remove_worker("other", "not heard of")
    assert one.lease(str(ZERO)).answer == "wait"


def test_nobody_backs_up_a_lease_of_its_own(store: RoundStore, join: Join) -> None:
    session = join("a")
    assert session.lease(str(ZERO)).micro_batches == (0, 1, 2, 3)
    late(store)
    assert session.lease(str(ZERO)).answer == "wait"


def test_a_slow_micro_batch_is_backed_up_once(store: RoundStore, join: Join) -> None:
    slow, second = join("slow"), join("second")
    assert slow.lease(str(ZERO)).micro_batches == (0, 1)
    send(second, ZERO, *second.lease(str(ZERO)).micro_batches)
    third = join("third")
    late(store)
    assert second.lease(str(ZERO)).micro_batches == (0, 1)
    assert third.lease(str(ZERO)).answer == "wait"
    assert second.lease(str(ZERO)).answer == "wait"


# Submitting


def test_somebody_elses_backup_task_is_no_lease(store: RoundStore, join: Join) -> None:
    slow, second = join("slow"), join("second")
    assert slow.lease(str(ZERO)).micro_batches == (0, 1)
    send(second, ZERO, *second.lease(str(ZERO)).micro_batches, nonce="own")
    third = join("third")
    late(store)
    assert second.lease(str(ZERO)).micro_batches == (0, 1)
    assert send(third, ZERO, 0, nonce="thief") == "lease_lost"
    assert send(second, ZERO, 0, nonce="backup") == "accepted"


def test_a_blob_that_expired_while_staged_is_refused_and_handed_back(
    redis: Redis, reducer: ReducerSession, join: Join
) -> None:
    session = join("a")
    session.lease(str(ZERO))
    assert submit_staged(reducer, session, '{"micro_batches":[0]}')[0] == b"refused"
    assert reducer.progress()[1] == {} and free(reducer) == [b"0"]
    assert session.lease(str(ZERO)).micro_batches == (0,)
    assert send(session, ZERO, 0, nonce="again") == "accepted"


def test_an_accepted_micro_batch_is_leased_by_nobody_any_more(store: RoundStore, join: Join) -> None:
    slow, quick = join("slow"), join("quick")
    assert slow.lease(str(ZERO)).micro_batches == (0, 1)
    send(quick, ZERO, *quick.lease(str(ZERO)).micro_batches, nonce="own")
    late(store)
    assert quick.lease(str(ZERO)).micro_batches == (0, 1)
    assert send(quick, ZERO, 0, 1, nonce="backup") == "accepted"
    assert store.redis.exists(store.keys.leases(), store.keys.backups()) == 0


# Inner states


def test_an_inner_state_is_taken_over_once_and_by_a_worker_that_takes_part(
    redis: Redis, reducer: ReducerSession, join: Join
) -> None:
    first, second, third = join("a"), join("b"), join("c")
    keys = reducer.keys
    first.hand_over([b"state of a"])
    redis.hset(keys.inner("b:kept"), "0", "not handed over")
    fenced = {"worker": "c", "session": "x", "inner_key": keys.inner("c:x")}
    assert reducer.scripts.call("take_over", keys, **fenced) == 0
    assert redis.exists(keys.inner("b:kept")) and not redis.exists(keys.inner("c:x"))
    assert bytes(second.take_over() or b"").endswith(b"state of a")
    assert third.take_over() is None and redis.llen(keys.handed()) == 0


def test_of_each_worker_the_newest_inner_state_is_offered_and_of_all_the_newest_256(
    redis: Redis, reducer: ReducerSession, join: Join
) -> None:
    before, handed = join("a", "before"), reducer.keys.handed()
    before.hand_over([b"old"])
    after = join("a", "after")
    assert redis.lrange(handed, 0, -1) == [b"a:before"]
    after.hand_over([b"new"])
    before.hand_over([b"fenced"])
    assert redis.lrange(handed, 0, -1) == [b"a:after"]
    redis.rpush(handed, "ab:other")
    after.hand_over([b"new"])
    assert redis.lrange(handed, 0, -1) == [b"ab:other", b"a:after"]
    redis.lpush(handed, *(f"b{number}:x" for number in range(300)))
    after.hand_over([b"new"])
    offered = redis.lrange(handed, 0, -1)
    assert len(offered) == 256 and offered[-2:] == [b"ab:other", b"a:after"]  # type: ignore[arg-type,index]


def test_an_inner_state_that_has_expired_is_passed_over(redis: Redis, reducer: ReducerSession, join: Join) -> None:
    first, second, third = join("a"), join("b"), join("c")
    first.hand_over([b"gone"])
    second.hand_over([b"state of b"])
    redis.delete(reducer.keys.inner(f"{first.worker_id}:{first.session_id}"))
    assert bytes(third.take_over() or b"").endswith(b"state of b")


# Answers


def test_of_very_many_answers_the_oldest_give_way(redis: Redis, reducer: ReducerSession, join: Join) -> None:
    session, key = join("a"), reducer.keys.answers()
    session.lease(str(ZERO))
    redis.hset(key, mapping={f"{place:040x}": f"{place}|stale" for place in range(1, 4096)})
    redis.hset(key, "places", 4095)
    assert send(session, ZERO, 0, nonce="n") == "accepted"
    assert redis.hlen(key) == 2048 + 1 and redis.hget(key, "places") == b"4096"
    assert redis.hexists(key, f"{2049:040x}") and not redis.hexists(key, f"{2048:040x}")
    again = session.submit(str(ZERO), "n", [(0, [b"update"], 0.5)], {})
    assert (again.outcome, again.before) == ("duplicate", "accepted")
    assert redis.hget(key, "places") == b"4096"  # an answer keeps its place


def test_an_answer_takes_as_much_memory_however_long_its_nonce_is(
    redis: Redis, reducer: ReducerSession, join: Join
) -> None:
    send(join("a"), ZERO, 0, nonce="n" * NAME_CHARACTERS)
    assert {len(field) for field in redis.hkeys(reducer.keys.answers())} == {40, len("places")}  # type: ignore[union-attr]


# Sizes


def test_no_more_is_kept_of_what_a_worker_says_than_may_be(redis: Redis, reducer: ReducerSession, join: Join) -> None:
    long, events_before = "x" * (NAME_CHARACTERS + 1), redis.xlen(reducer.keys.events())
    session = WorkerSession(redis, reducer.job_id, "a", long)
    with pytest.raises(ResponseError, match="at most 100 characters"):
        take_seat(session)
    with pytest.raises(ResponseError, match="at most 64 KiB"):
        take_seat(WorkerSession(redis, reducer.job_id, "a", "s"), about={"name": "x" * WORKER_EVENT_BYTES})
    assert redis.hgetall(reducer.keys.sessions()) == {} and redis.xlen(reducer.keys.events()) == events_before
    session = join("b")
    session.lease(str(ZERO))
    with pytest.raises(ResponseError, match="at most 100 characters"):
        send(session, ZERO, 0, nonce=long)
    with pytest.raises(ResponseError, match="at most 64 KiB"):
        session.submit(str(ZERO), "n", [(0, [b"update"], 0.5)], {"error": "x" * WORKER_EVENT_BYTES})
    with pytest.raises(ResponseError, match="at most 64 KiB"):
        session.leave("x" * WORKER_EVENT_BYTES)
    assert parts(reducer) == [] and redis.hlen(reducer.keys.answers()) == 0
    assert redis.hget(reducer.keys.sessions(), "b") == b"session of b"


def test_a_log_line_of_any_length_is_left_out(redis: Redis, store: RoundStore) -> None:
    assert store.log(["one", "x" * (LINE_BYTES + 1), "x" * LINE_BYTES])
    assert [len(fields[b"data"]) for _, fields in redis.xrange(store.keys.logs())] == [3, LINE_BYTES]  # type: ignore[union-attr, misc]
