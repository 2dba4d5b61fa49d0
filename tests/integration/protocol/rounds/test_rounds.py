"""The round protocol against a real server: one test per rule of the scripts."""

import threading
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ResponseError

from computeshare.errors import Banned, Fenced, JobGone
from computeshare.jobspec.sampling_plan import Round
from computeshare.protocol import keys
from computeshare.protocol.reducer_session import ReducerSession, StoredStep
from computeshare.protocol.refusal import Suspicion
from computeshare.protocol.round_store import RoundStore
from computeshare.protocol.worker_session import WorkerSession
from computeshare.types import Token
from tests.support.rounds import (
    GONE,
    ONE,
    PLAN,
    THREE,
    TWO,
    ZERO,
    Join,
    age,
    agree,
    commit,
    current,
    events,
    fill,
    know,
    late,
    of,
    parts,
    send,
    submit_staged,
    take_seat,
)

# Claiming and opening


def test_a_job_has_one_active_reducer_at_a_time(redis: Redis, store: RoundStore) -> None:
    first, second = ReducerSession(redis, store.job_id, "first"), ReducerSession(redis, store.job_id, "second")
    assert first.claim("host", 1, 60_000) and not second.claim("host", 2, 60_000)
    assert first.renew(0)
    assert second.claim("host", 2, 60_000) and second.fence > first.fence
    assert not first.renew(60_000)
    assert [event["fence"] for event in events(store, "reducer")] == [first.fence, second.fence]


def test_a_claim_expires_by_itself(redis: Redis, store: RoundStore) -> None:
    assert ReducerSession(redis, store.job_id, "first").claim("host", 1, 1)
    second = ReducerSession(redis, store.job_id, "second")
    tries = (second.claim("host", 2, 60_000) for _ in range(10_000))
    assert any(tries)


def test_a_claim_outlives_no_clock_that_is_set_back(redis: Redis, store: RoundStore) -> None:
    """A broker whose clock goes back an hour would keep what expires for an hour more."""
    first, second = (ReducerSession(redis, store.job_id, name) for name in ("first", "second"))
    assert first.claim("host", 1, 500)
    redis.pexpire(store.keys.reducer(), 3_600_000)
    assert not second.claim("host", 2, 500)
    assert redis.pttl(store.keys.reducer()) <= 500
    assert first.renew(60)  # it lives, and says so
    assert not second.claim("host", 2, 500)
    assert redis.pttl(store.keys.reducer()) <= 60  # looking does not lengthen it


def test_a_deleted_job_cannot_be_claimed_or_opened(redis: Redis, store: RoundStore) -> None:
    reducer = ReducerSession(redis, store.job_id, "first")
    assert reducer.claim("host", 1, 60_000)
    store.purge()
    assert not reducer.open(ZERO, [b"w"], [b"s"], PLAN.round(0), {})
    assert not ReducerSession(redis, store.job_id, "second").claim("host", 1, 60_000)
    assert not reducer.append("checkpoint", {})
    reducer.store_state(ZERO, of(ZERO, range(4)), ONE, [b"state"])
    left = {bytes(key).decode() for key in redis.scan_iter(store.keys.pattern())}
    assert all(":staged:" in key and redis.ttl(key) > 0 for key in left)


def test_opening_twice_changes_nothing(reducer: ReducerSession) -> None:
    assert not reducer.open(ONE, [b"other"], [b"other"], PLAN.round(1), {})
    assert reducer.read() is not None and reducer.read().token == ZERO  # type: ignore[union-attr]


def test_a_fenced_reducer_cannot_open(redis: Redis, store: RoundStore) -> None:
    first = ReducerSession(redis, store.job_id, "first")
    assert first.claim("host", 1, 60_000) and first.renew(0)
    assert ReducerSession(redis, store.job_id, "second").claim("host", 2, 60_000)
    assert not first.open(ZERO, [b"w"], [b"s"], PLAN.round(0), {})
    assert store.read() is None


def test_fences_grow_even_after_the_broker_lost_everything(redis: Redis, store: RoundStore) -> None:
    before = ReducerSession(redis, store.job_id, "before")
    assert before.claim("host", 1, 60_000)
    store.purge()
    store.publish("{}")
    after = ReducerSession(redis, store.job_id, "after")
    assert after.claim("host", 2, 60_000) and after.fence > before.fence
    assert after.renew(0)
    again = ReducerSession(redis, store.job_id, "again")
    assert again.claim("host", 3, 60_000) and again.fence > after.fence


def test_a_job_restored_at_its_last_version_is_finished(redis: Redis, store: RoundStore) -> None:
    reducer = ReducerSession(redis, store.job_id, "first")
    assert reducer.claim("host", 1, 60_000)
    assert reducer.open(ONE, [b"w"], [b"s"], Round(1, 0, 4, 0, 0), {})
    assert store.status() == "finished"


# Joining and leaving


def test_joining_before_the_job_is_open_says_so(redis: Redis, store: RoundStore) -> None:
    assert take_seat(WorkerSession(redis, store.job_id, "worker", "s")) == "unopened"


def test_the_newest_session_wins_and_the_older_is_fenced(join: Join) -> None:
    old = join("worker", "old")
    assert old.lease(str(ZERO)).micro_batches == (0, 1, 2, 3)
    new = join("worker", "new")
    with pytest.raises(Fenced, match="newer session"):
        old.lease(str(ZERO))
    assert send(old, ZERO, 0) == "fenced"
    assert new.lease(str(ZERO)).micro_batches == (0, 1, 2, 3)


def test_an_older_attempt_at_a_seat_cannot_join(redis: Redis, reducer: ReducerSession) -> None:
    session = WorkerSession(redis, reducer.job_id, "worker", "s")
    with pytest.raises(Fenced):
        session.join("seat-2", {})  # which nobody has issued yet
    redis.hset(reducer.keys.seats(), "worker", "seat-2")
    with pytest.raises(Fenced, match="another seat than seat-1"):
        session.join("seat-1", {})
    assert session.join("seat-2", {}) == "running"


def test_one_who_leaves_hands_the_leases_back_and_wakes_the_others(join: Join) -> None:
    leaver, other = join("a"), join("b")
    assert leaver.lease(str(ZERO)).micro_batches == (0, 1)
    assert other.lease(str(ZERO)).micro_batches == (2, 3)
    assert other.lease(str(ZERO)).answer == "wait"
    woken = threading.Thread(target=lambda: other.wait(4000))
    woken.start()
    leaver.leave("asked to")
    woken.join(3)
    assert not woken.is_alive()
    assert other.lease(str(ZERO)).micro_batches == (0, 1)
    leaver.leave("twice")
    assert len(events(RoundStore(other.redis, other.keys.job_id), "left")) == 1


def test_the_control_plane_ends_a_dead_workers_session(store: RoundStore, join: Join) -> None:
    dead, other = join("dead"), join("b")
    dead.lease(str(ZERO))
    store.remove_worker("dead", "not heard of for 10 s")
    assert other.lease(str(ZERO)).micro_batches == (0, 1, 2, 3)
    with pytest.raises(Fenced):
        dead.lease(str(ZERO))
    assert events(store, "left")[0]["reason"] == "not heard of for 10 s"


# Leasing


def test_a_round_is_shared_out_evenly(join: Join) -> None:
    sessions = [join(name) for name in "abc"]
    grants = [session.lease(str(ZERO)).micro_batches for session in sessions]
    assert grants == [(0, 1), (2,), (3,)]


def test_a_worker_of_unknown_speed_gets_no_more_units_than_the_terms_say(store: RoundStore, join: Join) -> None:
    first, other = join("first", unmeasured=1), join("other")
    assert first.lease(str(ZERO)).micro_batches == (0,)
    agree(store)
    assert other.lease(str(ZERO)).micro_batches == (1, 2)
    assert send(first, ZERO, 0) == "accepted"
    join("third", unmeasured=1)
    assert first.lease(str(ZERO)).micro_batches == (3,)
    assert send(first, ZERO, 3, nonce="another") == "accepted" and send(other, ZERO, 1, 2, nonce="o") == "accepted"


def test_once_its_speed_is_known_a_worker_gets_its_share(reducer: ReducerSession, join: Join) -> None:
    first = join("first", unmeasured=1)
    assert first.lease(str(ZERO)).micro_batches == (0,)
    assert send(first, ZERO, 0) == "accepted"
    assert first.lease(str(ZERO)).micro_batches == (1, 2, 3)


def test_a_lease_on_another_version_is_stale_and_names_the_current_one(join: Join) -> None:
    grant = join("a").lease(str(ONE))
    assert (grant.answer, grant.token) == ("stale", str(ZERO))


def test_a_token_of_the_same_version_on_other_weights_is_stale(join: Join) -> None:
    assert join("a").lease(str(Token(1, 0, "f" * 16))).answer == "stale"
    assert join("a").lease(str(Token(2, 0, "0" * 16))).answer == "stale"


def test_an_expired_lease_goes_to_the_next_who_asks(store: RoundStore, join: Join) -> None:
    slow, quick = join("slow"), join("quick")
    assert slow.lease(str(ZERO)).micro_batches == (0, 1)
    quick.lease(str(ZERO))
    age(store, 3_600_000)
    assert quick.lease(str(ZERO)).micro_batches == (0, 1)
    assert send(slow, ZERO, 0, 1) == "lease_lost"
    told = events(store, "reassigned")
    assert [(e["micro_batch"], e["from"], e["to"]) for e in told] == [(0, "slow", "quick"), (1, "slow", "quick")]


def test_a_clock_that_is_set_back_measures_nothing(store: RoundStore, join: Join) -> None:
    """Or the worker would count as one of a millisecond a unit, and the next round's deadline would be too early."""
    session = join("a")
    first, second, *_ = session.lease(str(ZERO)).micro_batches
    measured = []
    for micro_batch, back_ms in ((first, 0), (second, 3_600_000)):
        age(store, -back_ms)
        assert send(session, ZERO, micro_batch, nonce=str(micro_batch)) == "accepted"
        speed: Any = store.redis.hget(store.keys.speeds(), "a")
        measured.append((speed.partition(b"|")[0], store.redis.lrange(store.keys.arrivals(), 0, -1)))
    assert measured[0] == measured[1] and len(measured[0][1]) == 1


def test_a_late_update_counts_while_nobody_else_has_the_lease(store: RoundStore, join: Join) -> None:
    session = join("slow")
    session.lease(str(ZERO))
    age(store, 3_600_000)
    assert send(session, ZERO, 0, 1, 2, 3) == "accepted"


def test_a_slow_micro_batch_is_leased_twice_and_the_first_submission_wins(store: RoundStore, join: Join) -> None:
    slow, quick = join("slow"), join("quick")
    assert slow.lease(str(ZERO)).micro_batches == (0, 1)
    assert quick.lease(str(ZERO)).micro_batches == (2, 3)
    assert send(quick, ZERO, 2, 3, nonce="q") == "accepted"
    third = join("third")
    age(store, 15_000)
    assert quick.lease(str(ZERO)).micro_batches == (0, 1)
    assert third.lease(str(ZERO)).answer == "wait"
    assert send(slow, ZERO, 0, 1, nonce="s") == "accepted"
    assert send(quick, ZERO, 0, 1, nonce="late") == "duplicate"


def test_the_last_arrivals_are_told_newest_first(reducer: ReducerSession, join: Join) -> None:
    session, token = join("a"), str(ZERO)
    for micro_batch in session.lease(token).micro_batches:
        age(reducer, 1000)
        assert send(session, ZERO, micro_batch, nonce=f"{micro_batch}") == "accepted"
    arrivals = reducer.arrivals()
    assert [round(one, -3) for one in arrivals] == [4000, 3000, 2000, 1000]
    reducer.redis.rpush(reducer.keys.arrivals(), "x", "nan", *[7] * 100)
    assert commit(reducer, ONE)
    assert send(session, ONE, *session.lease(str(ONE)).micro_batches) == "accepted"
    assert reducer.redis.llen(reducer.keys.arrivals()) == 64 and reducer.arrivals()[1:6] == [*arrivals, 7]


def test_without_backup_tasks_a_slow_micro_batch_is_waited_for(store: RoundStore, join: Join) -> None:
    slow, quick = join("slow"), join("quick", backup=False)
    slow.lease(str(ZERO))
    send(quick, ZERO, *quick.lease(str(ZERO)).micro_batches)
    age(store, 15_000)
    assert quick.lease(str(ZERO)).answer == "wait"


def test_leases_last_as_long_as_the_workers_own_speed_suggests(store: RoundStore, join: Join) -> None:
    session = join("a")
    know(store, a=700)
    assert session.lease(str(ZERO)).ask_again_ms == 4 * 700
    know(store, a=600_000)
    assert session.lease(str(ZERO)).ask_again_ms == 4 * 600_000


# Submitting


def test_a_submission_is_accepted_once_and_a_repeated_one_is_a_duplicate(reducer: ReducerSession, join: Join) -> None:
    session = join("a")
    session.lease(str(ZERO))
    assert send(session, ZERO, 0, 1) == "accepted"
    assert send(session, ZERO, 0, 1) == "duplicate"
    assert send(session, ZERO, 0, 1, nonce="another") == "duplicate"
    state, received = reducer.progress()
    assert sorted(received) == [0, 1] and state is not None and state.count == 4
    assert [e["counted"] for e in events(reducer, "submission")] == [[0, 1], [], []]


def test_a_submission_repeated_after_the_commit_is_a_duplicate_not_stale(reducer: ReducerSession, join: Join) -> None:
    session = join("a")
    session.lease(str(ZERO))
    assert send(session, ZERO, 0, 1, 2, 3) == "accepted"
    assert commit(reducer, ONE)
    assert send(session, ZERO, 0, 1, 2, 3) == "duplicate"


def test_a_submission_on_an_old_version_is_stale_and_changes_nothing(reducer: ReducerSession, join: Join) -> None:
    slow = join("slow")
    fill(join, reducer)
    assert commit(reducer, ONE)
    receipt = slow.submit(str(ZERO), "n", [(0, [b"late"], 0.5)], {})
    assert (receipt.outcome, receipt.token) == ("stale", str(ONE))
    assert reducer.progress()[1] == {}


def test_an_update_without_a_lease_is_not_counted(join: Join) -> None:
    assert send(join("a"), ZERO, 0) == "lease_lost"


def test_a_submission_of_which_only_a_part_is_leased_counts_that_part(reducer: ReducerSession, join: Join) -> None:
    a, b = join("a"), join("b")
    a.lease(str(ZERO)), b.lease(str(ZERO))
    assert send(a, ZERO, 1, 2) == "accepted"
    assert sorted(reducer.progress()[1]) == [1]


def test_a_submission_that_names_a_micro_batch_twice_changes_nothing(reducer: ReducerSession, join: Join) -> None:
    session = join("a")
    session.lease(str(ZERO))
    with pytest.raises(ResponseError, match="names each micro-batch once"):
        send(session, ZERO, 0, 1, 0)
    assert reducer.progress()[1] == {} and events(reducer, "submission") == []
    assert send(session, ZERO, 0, 1) == "accepted"


def test_a_micro_batch_handed_back_twice_is_free_once(reducer: ReducerSession, join: Join) -> None:
    first, second = join("first"), join("second")
    assert first.lease(str(ZERO)).micro_batches == (0, 1)
    assert second.lease(str(ZERO)).micro_batches == (2, 3)
    late(reducer)
    assert second.lease(str(ZERO)).micro_batches == (0, 1)  # backed up
    first.leave("gone")
    assert send(second, ZERO, 0) == "accepted"
    reducer.refuse(ZERO, reducer.progress()[1][0], "checksum mismatch", "damaged")
    rejoined = join("third")
    second.leave("gone")
    freed = [*rejoined.lease(str(ZERO)).micro_batches, *rejoined.lease(str(ZERO)).micro_batches]
    assert sorted(freed) == [0, 1, 2, 3]


@pytest.mark.parametrize("report", ["{garbage", "[1]", '"text"', "1"])
def test_a_report_that_is_no_json_object_changes_nothing(
    redis: Redis, reducer: ReducerSession, join: Join, report: str
) -> None:
    session = join("a")
    session.lease(str(ZERO))
    k = reducer.keys
    redis.hset(k.staged("n:0"), "0", "x")
    with pytest.raises(ResponseError):
        submit_staged(reducer, session, report)
    assert reducer.progress()[1] == {}
    assert not redis.exists(k.answers())
    with pytest.raises(ResponseError):
        reducer.scripts.call("join", k, worker="b", session="session of b", seat="seat of b", event=report, frozen="")
    assert not redis.hexists(k.sessions(), "b")


def test_nothing_staged_is_left_behind(redis: Redis, reducer: ReducerSession, join: Join) -> None:
    session = join("a")
    send(session, ZERO, 0, nonce="no lease")
    send(session, ONE, 0, nonce="stale")
    session.lease(str(ZERO))
    send(session, ZERO, 0, nonce="good")
    send(session, ZERO, 0, nonce="good")
    assert not [key for key in redis.scan_iter(reducer.keys.pattern()) if b":staged:" in key]


def test_the_reducer_is_woken_when_the_round_is_full(redis: Redis, reducer: ReducerSession, join: Join) -> None:
    a, b = join("a"), join("b")
    a.lease(str(ZERO)), b.lease(str(ZERO))
    send(a, ZERO, 0, 1, nonce="a")
    assert redis.llen(reducer.keys.full()) == 0
    send(b, ZERO, 2, 3, nonce="b")
    assert redis.lrange(reducer.keys.full(), 0, -1) == [str(ZERO).encode()]


def test_many_workers_racing_count_each_micro_batch_once(redis_url: str, reducer: ReducerSession) -> None:
    from computeshare.transport.connections import connect

    outcomes: list[str] = []

    def work(worker: str) -> None:
        session = WorkerSession(connect(redis_url), reducer.job_id, worker, worker)
        take_seat(session)
        for turn in range(5):
            grant = session.lease(str(ZERO))
            if grant.micro_batches:
                outcomes.append(send(session, ZERO, *grant.micro_batches, nonce=f"{worker}{turn}"))

    threads = [threading.Thread(target=work, args=(f"worker{i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counted = [m for event in events(reducer, "submission") for m in event["counted"]]
    assert sorted(counted) == [0, 1, 2, 3] and set(outcomes) <= {"accepted", "duplicate"}


# Committing


def test_a_commit_opens_the_next_round_and_wakes_those_who_wait(reducer: ReducerSession, join: Join) -> None:
    waiting = join("waiting")
    fill(join, reducer)
    assert commit(reducer, ONE)
    assert waiting.wait(1000) == str(ONE)
    room = bytearray(20)
    blob, grant = waiting.pull(str(ONE), 1, [room])
    assert blob == [b"weights"] and grant.micro_batches == (4, 5) and room.startswith(b"weights")
    assert waiting.pull(str(ONE), 2, [room, bytearray(20)])[0] is waiting.pull(str(ONE), 2)[0] is None


def test_one_who_sleeps_until_a_round_is_full_sees_what_woke_it(reducer: ReducerSession, join: Join) -> None:
    assert reducer.look(patience_s=0.01)[1] == {}
    fill(join, reducer)
    assert reducer.redis.llen(reducer.keys.full()) == 1
    state, received, _ = reducer.look(patience_s=10)
    assert state is not None and sorted(received) == [0, 1, 2, 3]
    assert reducer.redis.llen(reducer.keys.full()) == 0


def test_late_reducer_cannot_overwrite_a_committed_round(redis: Redis, reducer: ReducerSession, join: Join) -> None:
    fill(join, reducer)
    state, _ = reducer.progress()
    assert state is not None and reducer.renew(0)
    other = ReducerSession(redis, reducer.job_id, "other")
    assert other.claim("host", 2, 60_000)
    counted = parts(reducer)
    assert not reducer.commit(
        state, counted, TWO, [b"late"], PLAN.round(1), {}
    )  # fenced, though the token still matches
    assert other.commit(state, parts(reducer), ONE, [b"weights"], PLAN.round(1), {})
    assert not other.commit(state, counted, TWO, [b"again"], PLAN.round(1), {})  # the token has moved on
    assert reducer.load(reducer.keys.weights(str(ONE))) == [b"weights"]
    assert len(events(reducer, "version")) == 1


def test_the_version_before_stays_readable_and_the_one_before_that_goes(reducer: ReducerSession, join: Join) -> None:
    for index, token in enumerate((ONE, TWO)):
        fill(join, reducer, f"filler{index}")
        assert commit(reducer, token)
    kept = [reducer.load(reducer.keys.weights(str(token))) is not None for token in (ZERO, ONE, TWO)]
    assert kept == [False, True, True]


def test_submissions_stay_until_the_state_they_led_to_is_stored(reducer: ReducerSession, join: Join) -> None:
    fill(join, reducer)
    assert commit(reducer, ONE, keep=False)
    assert reducer.updates(of(ZERO), range(1)) == [[b"update"]] * 4
    reducer.store_state(ZERO, of(ZERO, range(4)), ONE, [b"state 1"])
    assert reducer.updates(of(ZERO), range(1)) == [None] * 4
    assert reducer.load_state(ONE) == b"state 1"
    assert reducer.load_state(ZERO) is None


def test_a_state_is_stored_after_some_versions_and_takes_the_place_of_all_that_led_there(
    redis: Redis, reducer: ReducerSession, join: Join
) -> None:
    k = reducer.keys
    fill(join, reducer)
    assert commit(reducer, ONE, keep=False)
    fill(join, reducer)
    assert not commit(reducer, TWO), "nothing is there that the second step could be repeated from"
    assert commit(reducer, TWO, keep=False, stored=ZERO)
    assert reducer.steps() == [StoredStep(ZERO, of(ZERO, range(4))), StoredStep(ONE, of(ONE, range(4, 8)))]
    kept = [k.state(str(ZERO)), *(k.update(*one) for step in reducer.steps() for one in step.counted)]
    assert redis.exists(*kept) == len(kept) == 9 and {redis.ttl(key) for key in kept} == {-1}
    assert reducer.store_state(ZERO, [one for step in reducer.steps() for one in step.counted], TWO, [b"state 2"])
    assert reducer.load_state(TWO) == b"state 2" and not redis.exists(*kept) and reducer.steps() == []
    fill(join, reducer)
    assert commit(reducer, THREE, keep=False) and [step.base for step in reducer.steps()] == [TWO]


@pytest.mark.parametrize("entry", [b"", b"1.0.x|1", b"1.0.0000000000000000|1,2|1.0.0000000000000000", b"1.0.a|one|"])
def test_a_step_that_cannot_be_read_is_an_error(redis: Redis, reducer: ReducerSession, entry: bytes) -> None:
    redis.rpush(reducer.keys.steps(), entry)
    with pytest.raises(ValueError):
        reducer.steps()


def test_a_small_state_is_kept_with_the_commit(redis: Redis, reducer: ReducerSession, join: Join) -> None:
    fill(join, reducer)
    base, counted = current(reducer), parts(reducer)
    assert reducer.commit(base, counted, ONE, [b"weights"], PLAN.round(1), {"version": 1}, state=[b"state ", b"1"])
    assert reducer.load_state(ONE) == b"state 1" and redis.ttl(reducer.keys.state(str(ONE))) == -1
    assert reducer.updates(of(ZERO), range(1)) == [None] * 4
    assert not redis.exists(reducer.keys.state(str(ZERO)))
    again = reducer.commit(base, counted, TWO, [b"weights"], PLAN.round(1), {"version": 1}, state=[b"of no version"])
    assert not again and reducer.load_state(ONE) == b"state 1"
    assert not [key for key in redis.scan_iter(reducer.keys.pattern()) if key.endswith(b":state")]


def test_a_state_is_read_into_one_piece_of_memory_part_by_part(reducer: ReducerSession, join: Join) -> None:
    fill(join, reducer)
    assert commit(reducer, ONE, keep=False)
    assert reducer.load_state(ONE) is None
    parts = [bytes([number]) * 1_500_000 for number in range(3)]
    reducer.store_state(ZERO, of(ZERO, range(4)), ONE, parts)
    state = reducer.load_state(ONE)
    assert state == b"".join(parts) and not memoryview(state).readonly


def test_a_late_reducer_stores_no_state(redis: Redis, reducer: ReducerSession, join: Join) -> None:
    fill(join, reducer)
    assert commit(reducer, ONE, keep=False)
    assert reducer.renew(0)
    other = ReducerSession(redis, reducer.job_id, "other")
    assert other.claim("host", 2, 60_000)
    assert not reducer.store_state(ZERO, of(ZERO, range(4)), ONE, [b"late"])  # fenced
    assert other.store_state(ZERO, of(ZERO, range(4)), ONE, [b"state 1"])
    assert not other.store_state(ZERO, of(ZERO, range(4)), TWO, [b"of no version"])
    assert reducer.load_state(ONE) == b"state 1"
    assert not [key for key in redis.scan_iter(reducer.keys.pattern()) if b":staged:" in key]


def test_the_last_commit_ends_the_rounds(reducer: ReducerSession, join: Join) -> None:
    fill(join, reducer)
    state, _ = reducer.progress()
    assert state is not None and reducer.commit(state, parts(reducer), ONE, [b"w"], Round(1, 0, 4, 0, 0), {})
    assert join_status(reducer) == "finished"
    assert (
        WorkerSession(reducer.redis, reducer.job_id, "filler", "session of filler").lease(str(ONE)).answer == "finished"
    )


def join_status(reducer: ReducerSession) -> str:
    return take_seat(WorkerSession(reducer.redis, reducer.job_id, "late", "s"))


# Refusing


def test_a_refused_micro_batch_is_free_again_and_its_sender_gets_a_strike(
    redis: Redis, reducer: ReducerSession, join: Join
) -> None:
    liar = join("liar")
    liar.lease(str(ZERO))
    send(liar, ZERO, 0, 1, 2, 3)
    _, received = reducer.progress()
    assert reducer.refuse(ZERO, received[2], "checksum mismatch", "damaged").machines == 0
    assert redis.hget(reducer.keys.strikes(), "liar") == b"1"
    assert sorted(reducer.progress()[1]) == [0, 1, 3]
    assert join("honest").lease(str(ZERO)).micro_batches == (2,)
    assert events(reducer, "refused")[0]["reason"] == "checksum mismatch"


def test_a_worker_with_too_many_strikes_is_banned_until_somebody_lifts_it(
    redis: Redis, reducer: ReducerSession, join: Join
) -> None:
    liar = join("liar")
    for turn in range(5):
        liar.lease(str(ZERO))
        send(liar, ZERO, 0, nonce=f"lie {turn}")
        reducer.refuse(ZERO, reducer.progress()[1][0], "checksum mismatch", "damaged")
    with pytest.raises(Banned, match="liar is banned from the job"):
        liar.lease(str(ZERO))
    assert take_seat(liar, "seat of liar") == "banned"
    ban = {"worker": "liar", "session": "session of liar", "strikes": 5, "reason": "checksum mismatch"}
    assert events(reducer, "banned") == [ban]
    assert reducer.lift_ban("liar")
    assert take_seat(liar, "seat of liar") == "running"
    assert events(reducer, "unbanned") == [{"worker": "liar"}]


def test_a_ban_frees_what_the_worker_had_leased(reducer: ReducerSession, join: Join) -> None:
    liar = join("liar")
    reducer.redis.hset(reducer.keys.strikes(), "liar", 4)
    liar.lease(str(ZERO))
    send(liar, ZERO, 0, nonce="lie")
    reducer.refuse(ZERO, reducer.progress()[1][0], "checksum mismatch", "damaged")
    assert sorted(join("honest").lease(str(ZERO)).micro_batches) == [0, 1, 2, 3]


def test_a_late_refusal_spares_the_submission_that_took_the_place(reducer: ReducerSession, join: Join) -> None:
    bad = join("bad")
    bad.lease(str(ZERO))
    send(bad, ZERO, 0, nonce="bad")
    judged = reducer.progress()[1][0]
    assert reducer.refuse(ZERO, judged, "checksum mismatch", "damaged").machines == 0
    bad.lease(str(ZERO))
    assert send(bad, ZERO, 0, nonce="good") == "accepted"
    assert reducer.refuse(ZERO, judged, "checksum mismatch", "damaged") == GONE
    assert sorted(reducer.progress()[1]) == [0]


def test_values_that_are_not_finite_are_a_strike_until_another_agrees(
    redis: Redis, reducer: ReducerSession, join: Join
) -> None:
    a, b = join("a"), join("b")
    assert 0 in a.lease(str(ZERO)).micro_batches
    send(a, ZERO, 0, nonce="a")
    assert reducer.refuse(ZERO, reducer.progress()[1][0], "not finite", "not_finite") == Suspicion(1, 1, 1, 2)
    assert redis.hgetall(reducer.keys.strikes()) == {b"a": b"1"}
    assert 0 in b.lease(str(ZERO)).micro_batches
    send(b, ZERO, 0, nonce="b")
    assert reducer.refuse(ZERO, reducer.progress()[1][0], "not finite", "not_finite") == Suspicion(2, 2, 2, 2)
    assert redis.hgetall(reducer.keys.strikes()) == {b"a": b"0"}
    assert events(reducer, "forgiven") == [{"worker": "a", "strikes": 1}]


def test_values_that_are_not_finite_are_no_strike_of_the_only_worker(
    redis: Redis, reducer: ReducerSession, join: Join
) -> None:
    solo = join("solo")
    for times in (1, 2):
        assert 0 in solo.lease(str(ZERO)).micro_batches
        send(solo, ZERO, 0, nonce=f"nonce {times}")
        answer = reducer.refuse(ZERO, reducer.progress()[1][0], "not finite", "not_finite")
        assert answer == Suspicion(1, times, 1, 1)
    assert redis.hgetall(reducer.keys.strikes()) == {}


def test_every_session_that_sends_a_round_what_is_not_finite_is_told_of(reducer: ReducerSession, join: Join) -> None:
    a, b = join("a"), join("b")
    first, second = (session.lease(str(ZERO)).micro_batches[0] for session in (a, b))
    send(a, ZERO, first, nonce="a")
    send(b, ZERO, second, nonce="b")
    received = reducer.progress()[1]
    assert reducer.refuse(ZERO, received[first], "not finite", "not_finite") == Suspicion(1, 1, 1, 2)
    assert reducer.refuse(ZERO, received[second], "not finite", "not_finite") == Suspicion(1, 1, 2, 2)


def test_another_worker_is_asked_about_values_that_are_not_finite(reducer: ReducerSession, join: Join) -> None:
    a = join("a")
    assert a.lease(str(ZERO)).micro_batches == (0, 1, 2, 3)
    b = join("b")
    send(a, ZERO, 0, nonce="a")
    reducer.refuse(ZERO, reducer.progress()[1][0], "not finite", "not_finite")
    asked = a.lease(str(ZERO))
    assert asked.answer == "wait" and asked.ask_again_ms <= 500
    assert b.lease(str(ZERO)).micro_batches == (0,)


def test_what_two_workers_sent_is_asked_for_again_where_the_reducer_died_over_it(
    reducer: ReducerSession, join: Join
) -> None:
    a, b = join("a"), join("b")
    for nonce, session in (("a", a), ("b", b)):
        assert 0 in session.lease(str(ZERO)).micro_batches
        send(session, ZERO, 0, nonce=nonce)
        reducer.refuse(ZERO, reducer.progress()[1][0], "not finite", "not_finite")
    assert 0 in a.lease(str(ZERO)).micro_batches
    send(a, ZERO, 0, nonce="again")
    assert reducer.refuse(ZERO, reducer.progress()[1][0], "not finite", "not_finite") == Suspicion(2, 3, 2, 2)


def test_a_worker_whose_share_nobody_may_take_is_asked_itself_again(reducer: ReducerSession, join: Join) -> None:
    sessions = [join(worker, sharers=4) for worker in "abcd"]
    grants = [session.lease(str(ZERO)).micro_batches for session in sessions]
    send(sessions[0], ZERO, *grants[0], nonce="a")
    reducer.refuse(ZERO, reducer.progress()[1][grants[0][0]], "not finite", "not_finite")
    assert sessions[0].lease(str(ZERO)).micro_batches == grants[0]


def test_a_reducer_that_lost_its_claim_cannot_refuse(redis: Redis, reducer: ReducerSession, join: Join) -> None:
    fill(join, reducer)
    part = reducer.progress()[1][0]
    assert reducer.renew(0) and ReducerSession(redis, reducer.job_id, "other").claim("host", 2, 60_000)
    assert reducer.refuse(ZERO, part, "reason", "damaged") == GONE
    assert len(reducer.progress()[1]) == 4


# Ending


def test_an_ended_job_gives_no_leases_and_takes_no_submissions(reducer: ReducerSession, join: Join) -> None:
    session = join("a")
    session.lease(str(ZERO))
    reducer.end("cancelled")
    assert session.lease(str(ZERO)).answer == "cancelled"
    assert send(session, ZERO, 0) == "stale"
    assert not commit(reducer, ONE)
    assert reducer.job_id.encode() not in reducer.redis.smembers(keys.JOBS)  # type: ignore[operator]


def test_ending_wakes_those_who_wait(reducer: ReducerSession, join: Join) -> None:
    session = join("a")
    woken = threading.Thread(target=lambda: session.wait(4000))
    woken.start()
    reducer.end("cancelled")
    woken.join(3)
    assert not woken.is_alive()


def test_a_deleted_job_comes_back_by_no_script(redis: Redis, reducer: ReducerSession, join: Join) -> None:
    session = join("a")
    session.lease(str(ZERO))
    reducer.purge()
    with pytest.raises(JobGone):
        session.lease(str(ZERO))
    assert send(session, ZERO, 0) == "gone"
    session.leave("late")
    reducer.append("checkpoint", {})
    reducer.end("failed")
    assert [key for key in redis.scan_iter(reducer.keys.pattern()) if b":staged:" not in key] == []


def test_scripts_are_loaded_again_after_the_broker_lost_them(redis: Redis, join: Join) -> None:
    session = join("a")
    redis.script_flush()
    assert session.lease(str(ZERO)).answer == "leased"
    redis.script_flush()
    assert send(session, ZERO, 0) == "accepted"
