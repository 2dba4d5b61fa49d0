"""Rounds made of whatever comes first, leases that are kept, messages of parts, and versions as differences."""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from redis import Redis

from computeshare.protocol import channel as channel_module
from computeshare.protocol import reducer_session
from computeshare.protocol.reducer_session import Link, ReducerSession, StoredStep
from computeshare.protocol.round_store import RoundStore
from computeshare.protocol.worker_session import WorkerSession
from computeshare.types import Token
from tests.support.rounds import (
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
    free,
    of,
    opened,
    parts,
    send,
    take_seat,
)

WINDOW = PLAN.window(0)
"""Any four of the ten micro-batches of an epoch make a version."""


@pytest.fixture
def reducer(redis: Redis, store: RoundStore) -> ReducerSession:
    """The active reducer of a job whose versions are made of the micro-batches that come first."""
    return opened(redis, store, WINDOW, recent=2)


def buffered(reducer: ReducerSession, token: Token, *numbers: int, keep: bool = True) -> bool:
    """Commit a version made of these micro-batches, and the state with it if that is to be kept."""
    base, counted = current(reducer), [part for part in parts(reducer) if part.micro_batch in numbers]
    following = PLAN.window(token.version)
    if following.epoch == PLAN.round(base.version).epoch:
        following = replace(following, first=base.first, count=base.count)
    done = reducer.commit(base, counted, token, [b"weights"], following, {"version": token.version})
    if done and keep:
        reducer.store_state(base.token, [(part.base, part.micro_batch) for part in counted], token, [b"state"])
    return done


def lease(session: WorkerSession, token: Token) -> tuple[int, ...]:
    return session.lease(str(token)).micro_batches


def is_full(reducer: ReducerSession) -> bool:
    return bool(reducer.redis.llen(reducer.keys.full()))


@pytest.fixture
def begun(reducer: ReducerSession, join: Join) -> tuple[WorkerSession, WorkerSession]:
    """A slow worker with a lease on 0 and 1, and a quick one whose 2, 3, 4 and 5 have made version 1."""
    slow, quick = join("slow"), join("quick")
    assert (lease(slow, ZERO), lease(quick, ZERO), lease(quick, ZERO)) == ((0, 1), (2, 3), (4, 5))
    assert send(quick, ZERO, 2, 3, 4, nonce="three") == "accepted" and not is_full(reducer)
    assert send(quick, ZERO, 5, nonce="fourth") == "accepted" and is_full(reducer)
    assert buffered(reducer, ONE, 2, 3, 4, 5)
    return slow, quick


def test_what_was_computed_on_the_version_before_counts_in_the_next(
    reducer: ReducerSession, begun: tuple[WorkerSession, WorkerSession]
) -> None:
    slow, quick = begun
    assert not is_full(reducer) and parts(reducer) == []
    assert lease(quick, ONE) == (6, 7)  # where the leases had got to
    assert send(slow, ZERO, 0, 1) == "accepted"
    assert send(quick, ONE, 6, 7, nonce="own") == "accepted" and is_full(reducer)
    assert {part.micro_batch: part.base for part in parts(reducer)} == {
        **dict.fromkeys((0, 1), str(ZERO)),
        **dict.fromkeys((6, 7), str(ONE)),
    }
    base = current(reducer)
    assert buffered(reducer, TWO, 0, 1, 6, 7, keep=False)
    assert current(reducer).base == base.token
    assert reducer.steps() == [StoredStep(ONE, [*of(ZERO, [0, 1]), *of(ONE, [6, 7])])]
    assert reducer.redis.lrange(reducer.keys.recent(), 0, -1) == [str(TWO).encode(), str(ONE).encode()]


def test_what_comes_too_late_is_stale_and_its_lease_is_handed_back(
    reducer: ReducerSession, begun: tuple[WorkerSession, WorkerSession]
) -> None:
    slow, quick = begun
    assert send(quick, ONE, *lease(quick, ONE), *lease(quick, ONE), nonce="more") == "accepted"
    assert buffered(reducer, TWO, 6, 7, 8, 9)
    assert send(slow, ZERO, 0, 1) == "stale" and free(reducer) == [b"0", b"1"]
    assert lease(quick, TWO) == (0,)  # two make the epoch's last version


def test_a_backup_that_comes_too_late_leaves_the_first_lease_alone(
    reducer: ReducerSession, begun: tuple[WorkerSession, WorkerSession]
) -> None:
    slow, quick = begun
    assert (lease(quick, ONE), lease(quick, ONE)) == ((6, 7), (8, 9))
    age(reducer, 1500)  # slow by now, but not expired
    assert lease(quick, ONE) == (0, 1)
    assert send(quick, ONE, 6, 7, 8, 9, nonce="more") == "accepted"
    assert buffered(reducer, TWO, 6, 7, 8, 9)
    reducer.redis.lrem(reducer.keys.recent(), 0, str(ONE))  # it is too old by now
    assert send(quick, ONE, 0, 1, nonce="late") == "stale"
    assert free(reducer) == [] and not reducer.redis.exists(reducer.keys.backups())
    assert sorted(reducer.redis.hkeys(reducer.keys.leases())) == [b"0", b"1"]  # type: ignore[arg-type]
    assert send(slow, TWO, 0, 1) == "accepted"


def test_what_comes_beyond_a_version_stays_for_the_next(reducer: ReducerSession, join: Join) -> None:
    session = join("only")
    assert (lease(session, ZERO), lease(session, ZERO)) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert send(session, ZERO, *range(8)) == "accepted"
    assert buffered(reducer, ONE, 4, 5, 6, 7)
    assert [part.micro_batch for part in parts(reducer)] == [0, 1, 2, 3] and is_full(reducer)
    assert reducer.updates(of(ZERO, [0, 4]), range(1)) == [[b"update"], None]
    assert buffered(reducer, TWO, 0, 1, 2, 3)
    assert not is_full(reducer) and (current(reducer).needed, current(reducer).total) == (2, 10)


def test_nobody_computes_more_on_a_version_once_the_next_is_on_its_way(reducer: ReducerSession, join: Join) -> None:
    quick, slow = join("quick"), join("slow")
    assert send(quick, ZERO, *lease(quick, ZERO), *lease(quick, ZERO)) == "accepted"
    assert [session.lease(str(ZERO)).answer for session in (quick, slow)] == ["wait", "wait"]
    assert buffered(reducer, ONE, *range(4)) and lease(slow, ONE) == (4, 5)


def test_what_would_be_too_late_once_its_turn_comes_is_handed_back(reducer: ReducerSession, join: Join) -> None:
    session = join("only")
    numbers = [*lease(session, ZERO), *lease(session, ZERO), *lease(session, ZERO)]
    assert numbers == list(range(10))
    assert send(session, ZERO, *numbers) == "accepted"  # four for the next version, four for the one after that
    assert [part.micro_batch for part in parts(reducer)] == list(range(8)) and free(reducer) == [b"8", b"9"]
    assert events(reducer, "submission")[-1]["late"] == [8, 9]
    assert not reducer.redis.exists(reducer.keys.leases())
    came = [part.at for part in parts(reducer)]
    assert came == sorted(set(came)) and abs(came[0] - reducer.now_ms()) < 60_000
    assert send(session, ZERO, *numbers, nonce="again") == "duplicate"
    assert buffered(reducer, ONE, 0, 1, 2, 3) and buffered(reducer, TWO, 4, 5, 6, 7)
    assert lease(session, TWO) == (8, 9)


def test_a_submission_all_of_which_is_too_late_is_stale(reducer: ReducerSession, join: Join) -> None:
    slow, quick = join("slow"), join("quick")
    assert lease(slow, ZERO) == (0, 1)
    numbers = [m for _ in range(4) for m in lease(quick, ZERO)]
    assert send(quick, ZERO, *numbers) == "accepted" and len(parts(reducer)) == 8
    assert send(slow, ZERO, 0, 1, nonce="slow") == "stale" and free(reducer) == [b"0", b"1"]


def test_an_update_that_is_late_already_has_less_time_to_wait(
    reducer: ReducerSession, begun: tuple[WorkerSession, WorkerSession]
) -> None:
    slow, quick = begun
    assert send(quick, ONE, *lease(quick, ONE), *lease(quick, ONE), nonce="full") == "accepted"
    assert send(slow, ZERO, 0, 1) == "stale"  # one version late, and two once its turn comes


def test_a_backup_that_counts_takes_its_micro_batch_from_those_that_were_handed_back(
    reducer: ReducerSession, begun: tuple[WorkerSession, WorkerSession]
) -> None:
    slow, quick = begun
    assert (lease(quick, ONE), lease(quick, ONE)) == ((6, 7), (8, 9))
    age(reducer, 1500)
    assert lease(quick, ONE) == (0, 1)  # in case that the slow one never comes
    slow.leave("too slow")
    assert free(reducer) == [b"0", b"1"]
    assert send(quick, ONE, 0, 1, 6, 7) == "accepted" and free(reducer) == []
    assert buffered(reducer, TWO, 0, 1, 6, 7)
    assert sorted(reducer.redis.hkeys(reducer.keys.leases())) == [b"8", b"9"]  # type: ignore[arg-type]
    assert lease(quick, TWO) == ()


def test_who_sent_what_is_not_finite_is_remembered_beyond_the_next_version(
    reducer: ReducerSession, begun: tuple[WorkerSession, WorkerSession]
) -> None:
    slow, quick = begun
    assert send(slow, ZERO, 0, 1) == "accepted"
    found = reducer.refuse(ONE, reducer.progress()[1][0], "not finite", "not_finite")
    reducer.refuse(ONE, reducer.progress()[1][1], "not finite", "not_finite")
    assert (found.machines, found.times) == (1, 1)
    assert send(quick, ONE, *lease(quick, ONE), *lease(quick, ONE), *lease(quick, ONE), nonce="all") == "accepted"
    assert 0 in {part.micro_batch for part in parts(reducer)}
    counted = [part.micro_batch for part in parts(reducer)]
    assert buffered(reducer, TWO, *counted[1:5]) and reducer.redis.hkeys(reducer.keys.suspects()) == [b"0"]
    found = reducer.refuse(TWO, reducer.progress()[1][0], "not finite", "not_finite")
    assert (found.machines, found.times) == (2, 2)  # which nobody is to blame for


def test_more_than_the_jobs_last_version_needs_does_not_keep_it_from_being_made(
    reducer: ReducerSession, join: Join
) -> None:
    session = join("only")
    assert send(session, ZERO, *lease(session, ZERO), *lease(session, ZERO)) == "accepted"
    nothing = replace(PLAN.window(1), count=0, wanted=None)
    counted = parts(reducer)[:4]
    assert reducer.commit(current(reducer), counted, ONE, [b"weights"], nothing, {"version": 1})
    assert current(reducer).status == "finished"


def test_a_restored_window_is_what_was_not_counted(redis: Redis, store: RoundStore, job_id: str) -> None:
    reducer = ReducerSession(redis, store.job_id, "first")
    assert reducer.claim("host", 1, 60_000)
    pending = replace(PLAN.window(1).behind(10), carried=(0, 3, 5, 7, 8, 9))  # all were leased when it was written
    assert pending.count == 0
    assert reducer.open(ONE, [b"weights 1"], [b"state 1"], pending, {}, recent=2)
    assert current(reducer).status == "running" and current(reducer).units == [0, 3, 5, 7, 8, 9]
    session = WorkerSession(redis, job_id, "a", "a")
    take_seat(session)
    numbers = lease(session, ONE)
    assert numbers == (0, 3, 5, 7) and send(session, ONE, *numbers) == "accepted"
    following = replace(PLAN.window(2), first=pending.first, count=0, carried=pending.carried)
    assert reducer.commit(current(reducer), parts(reducer), TWO, [b"weights"], following, {"version": 2})
    assert current(reducer).status == "running" and lease(session, TWO) == (8, 9)


def test_a_repeated_submission_is_told_what_became_of_the_first(reducer: ReducerSession, join: Join) -> None:
    session = join("only")
    numbers = lease(session, ZERO)
    updates = [(m, [b"update"], 0.5) for m in numbers]
    first, again = (session.submit(str(ZERO), "nonce", updates, {}) for _ in range(2))
    assert (first.outcome, first.before, again.outcome, again.before) == ("accepted", "", "duplicate", "accepted")


def test_the_last_version_of_an_epoch_takes_what_is_left_and_the_next_begins_anew(
    reducer: ReducerSession, join: Join
) -> None:
    session = join("only")
    for token, following in ((ZERO, ONE), (ONE, TWO), (TWO, THREE)):
        numbers = lease(session, token)
        assert send(session, token, *numbers, nonce=str(token)) == "accepted"
        assert buffered(reducer, following, *numbers)
    assert current(reducer).units == list(range(10, 20)) and parts(reducer) == []
    assert lease(session, THREE) == (10, 11, 12, 13)


def test_a_checkpoint_knows_what_is_not_counted_yet(
    reducer: ReducerSession, begun: tuple[WorkerSession, WorkerSession]
) -> None:
    slow, _ = begun
    assert reducer.pending(ONE) == (6, [0, 1])
    assert reducer.pending(ZERO) is None
    slow.leave("bye")
    assert reducer.pending(ONE) == (6, [0, 1])


def test_a_lease_is_kept_for_as_long_as_its_worker_says(reducer: ReducerSession, join: Join) -> None:
    a, b = join("a"), join("b")
    assert (lease(a, ZERO), lease(b, ZERO)) == ((0, 1), (2, 3))
    age(reducer, 60_000)
    assert a.extend([0, 2]) == "running"
    kept = expiries(reducer)
    now = reducer.now_ms()
    assert now + 4000 < kept[0] < now + 6000  # its own, and what it named
    assert max(kept[1], kept[2], kept[3]) < now
    assert send(a, ZERO, 0) == "accepted"


def test_what_is_staged_is_kept_with_its_lease(reducer: ReducerSession, join: Join) -> None:
    session = join("a")
    lease(session, ZERO)
    session.stage("nonce", 0, {0: b"part"})
    key = reducer.keys.staged(f"{session.worker_id}:nonce:0")
    reducer.redis.expire(key, 5)
    assert session.extend([0]) == "running" and reducer.redis.ttl(key) == 5
    assert session.extend([0], "nonce") == "running" and int(reducer.redis.ttl(key)) > 500  # type: ignore[arg-type]


def test_a_long_lease_is_not_made_shorter(reducer: ReducerSession, join: Join) -> None:
    session = join("a")
    lease(session, ZERO)
    before = expiries(reducer)
    assert session.extend(range(4)) == "running" and expiries(reducer) == before


def test_a_backup_is_kept_too(reducer: ReducerSession, join: Join) -> None:
    slow, quick = join("slow"), join("quick")
    assert lease(slow, ZERO) == (0, 1)
    assert send(quick, ZERO, *lease(quick, ZERO)) == "accepted"  # its speed is known from now on
    while 0 not in lease(quick, ZERO):
        age(reducer, 400)
    age(reducer, 60_000)
    assert quick.extend([0, 1]) == "running"
    kept = reducer.redis.hgetall(reducer.keys.backups())
    assert {bytes(m): int(held.split(b"|")[1]) > reducer.now_ms() for m, held in kept.items()} == {
        b"0": True,
        b"1": True,
    }  # type: ignore[union-attr]
    assert max(expiries(reducer).values()) < reducer.now_ms()


def test_work_that_others_have_done_or_taken_is_lost(reducer: ReducerSession, join: Join) -> None:
    slow, quick = join("slow"), join("quick")
    assert lease(slow, ZERO) == (0, 1)
    assert send(quick, ZERO, *lease(quick, ZERO)) == "accepted"
    while 0 not in lease(quick, ZERO):
        age(reducer, 400)
    assert (slow.extend([0, 1]), quick.extend([0, 1])) == ("running", "running")
    assert send(quick, ZERO, 0, nonce="first") == "accepted"
    assert (slow.extend([0]), slow.extend([0, 1])) == ("lost", "running")
    assert send(quick, ZERO, 1, nonce="second") == "accepted"
    assert slow.extend([0, 1]) == "lost" and slow.extend(()) == "running"


def test_a_session_that_was_replaced_keeps_no_lease(reducer: ReducerSession, join: Join, store: RoundStore) -> None:
    old = join("a", "one")
    lease(old, ZERO)
    join("a", "two")
    assert old.extend([0]) == "fenced"
    store.pause()
    assert join_again(reducer).extend([0]) == "paused"
    store.purge()
    assert old.extend([0]) == "gone"


def join_again(reducer: ReducerSession) -> WorkerSession:
    return WorkerSession(reducer.redis, reducer.job_id, "a", "two")


def expiries(reducer: ReducerSession) -> dict[int, int]:
    held: Any = reducer.redis.hgetall(reducer.keys.leases())
    return {int(m): int(lease.split(b"|")[1]) for m, lease in held.items()}


@pytest.mark.parametrize(
    "other", [[b"one"], [b"one", b"two", b"three"], [b"one", b""]], ids=["too few", "too many", "empty"]
)
def test_a_message_that_has_not_all_its_parts_or_others_is_refused(
    reducer: ReducerSession, join: Join, other: list[bytes]
) -> None:
    session = join("a")
    lease(session, ZERO)
    sent = [(0, [b"one", b"two"], 0.5), (1, other, 0.5)]
    assert session.submit(str(ZERO), "nonce", sent, {}).outcome == "accepted"
    assert [(part.micro_batch, part.size) for part in parts(reducer)] == [(0, 6)]
    assert 1 in lease(session, ZERO)  # it was handed back
    assert session.submit(str(ZERO), "again", [(1, [b"one", b"two"], 0.5)], {}).outcome == "accepted"


def test_what_was_left_of_an_opening_before_is_forgotten(redis: Redis, store: RoundStore) -> None:
    redis.lpush(store.keys.recent(), str(TWO))
    redis.rpush(store.keys.chain(), str(TWO))
    redis.rpush(store.keys.steps(), f"{ONE}|1|")
    reducer = ReducerSession(redis, store.job_id, "first")
    assert reducer.claim("host", 1, 60_000)
    assert reducer.open(ZERO, [b"weights 0"], [b"state 0"], PLAN.round(0), {})
    assert redis.lrange(store.keys.recent(), 0, -1) == [str(ZERO).encode()]
    assert reducer.chain() == ([str(ZERO)], str(ZERO)) and reducer.steps() == []


def link(reducer: ReducerSession, session: WorkerSession, token: Token, link: Link) -> None:
    """Commit the window's next version as a difference."""
    numbers = lease(session, current(reducer).token)
    assert send(session, current(reducer).token, *numbers, nonce=f"link {token}") == "accepted"
    base, counted = current(reducer), parts(reducer)
    following = replace(PLAN.window(token.version), first=base.first, count=base.count)
    delta = f"to {token.version}".encode()
    assert reducer.commit(base, counted, token, [delta], following, {"version": token.version}, link=link)
    reducer.store_state(base.token, [(part.base, part.micro_batch) for part in counted], token, [b"state"])


def test_a_chain_leads_from_a_snapshot_or_from_what_is_at_hand(reducer: ReducerSession, join: Join) -> None:
    session = join("a")
    link(reducer, session, ONE, Link())
    link(reducer, session, TWO, Link())
    way, grant = session.follow("", str(TWO), 1)
    assert way is not None and (way.whole, way.deltas) == ([b"weights 0"], [[b"to 1"], [b"to 2"]])
    assert grant.answer == "leased"
    way, _ = session.follow(str(ONE), str(TWO), 1)
    assert way is not None and (way.whole, way.deltas) == (None, [[b"to 2"]])
    way, _ = session.follow("", str(THREE), 1)
    assert way is None


def test_a_large_difference_outlives_the_sending_of_a_large_snapshot(
    reducer: ReducerSession, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (reducer_session, channel_module):
        monkeypatch.setattr(module, "AT_ONCE_BYTES", 10)
    monkeypatch.setattr(channel_module, "LARGE", 1)
    slow = SimpleNamespace(monotonic=itertools.count(0, 60).__next__)  # a minute for each command
    monkeypatch.setattr(channel_module, "time", slow)
    session = join("a")
    numbers = lease(session, current(reducer).token)
    assert send(session, current(reducer).token, *numbers, nonce="one") == "accepted"
    base, counted = current(reducer), parts(reducer)
    following = replace(PLAN.window(1), first=base.first, count=base.count)
    assert reducer.begin([b"twelve bytes", b"more"]) == ()
    (staged,) = reducer.redis.keys(reducer.keys.staged("*weights*"))
    lives = []

    def exchanged(channel: Any, commands: Any, into: Any = None, **other: Any) -> Any:
        if commands[0][0] == "HSET":  # a part of the snapshot has just been sent, and long before that the difference
            reducer.redis.expire(staged, 5)
        replies = exchange(channel, commands, into, **other)
        lives.append(reducer.redis.ttl(staged))
        return replies

    exchange = channel_module.Channel.exchange
    monkeypatch.setattr(channel_module.Channel, "exchange", exchanged)
    whole = Link([b"a snapshot", b"in two parts"], kept=1)
    assert reducer.commit(base, counted, ONE, (), following, {"version": 1}, link=whole)
    assert len(lives) > 4 and min(lives[:-1]) > 100
    way, _ = session.follow(str(ZERO), str(ONE), 2, [bytearray(50), bytearray(50)])
    assert way is not None and (way.whole, way.deltas) == (None, [[b"twelve bytes", b"more"]])


def test_a_snapshot_lets_go_of_what_lies_before_the_last_one(reducer: ReducerSession, join: Join) -> None:
    session, k = join("a"), reducer.keys
    link(reducer, session, ONE, Link([b"weights 1"], kept=1))
    assert reducer.chain() == ([str(ZERO), str(ONE)], str(ONE))
    assert reducer.redis.ttl(k.weights(str(ONE))) == -1 and reducer.redis.ttl(k.delta(str(ONE))) == -1
    link(reducer, session, TWO, Link([b"weights 2"], kept=1, outdated=[ZERO]))
    assert reducer.chain() == ([str(ONE), str(TWO)], str(TWO))
    assert not reducer.redis.exists(k.weights(str(ZERO)))
    way, _ = session.follow("", str(TWO), 1)
    assert way is not None and (way.whole, way.deltas) == ([b"weights 2"], [])
    way, _ = session.follow(str(ONE), str(TWO), 1)
    assert way is not None and (way.whole, way.deltas) == (None, [[b"to 2"]])


def test_a_whole_round_is_not_a_window(redis: Redis, store: RoundStore, job_id: str) -> None:
    reducer = ReducerSession(redis, store.job_id, "first")
    assert reducer.claim("host", 1, 60_000) and reducer.open(ZERO, [b"w"], [b"s"], PLAN.round(0), {})
    session = WorkerSession(redis, job_id, "a", "a")
    take_seat(session)
    assert send(session, ZERO, *lease(session, ZERO)) == "accepted"
    counted = parts(reducer)
    assert not reducer.commit(current(reducer), counted[:2], ONE, [b"w"], PLAN.round(1), {})
    assert commit(reducer, ONE)


def test_a_share_is_of_the_updates_that_make_a_version(reducer: ReducerSession, join: Join) -> None:
    quick, other = join("quick", sharers=2), join("other", sharers=2)
    assert lease(quick, ZERO) == (0, 1)  # of four, though the window has ten
    assert lease(quick, ZERO) == ()
    agree(reducer)
    assert lease(quick, ZERO) != ()
    agree(reducer, sharers=2)
    assert send(quick, ZERO, 0, 1, 2, 3) == "accepted"
    assert [part.micro_batch for part in parts(reducer)] == [0, 1] and not is_full(reducer)
    assert send(other, ZERO, *lease(other, ZERO), nonce="other") == "accepted"
    assert is_full(reducer)


def test_a_peer_leases_on_the_version_it_has_while_one_more_may_follow(
    redis: Redis, store: RoundStore, reducer: ReducerSession, join: Join
) -> None:
    one, two = join("one"), join("two")
    redis.hset(store.keys.round(), "recent", 3)
    agree(store, peers=True)
    for base, token in ((ZERO, ONE), (ONE, TWO)):
        while len(parts(reducer)) < 4:
            unit = two.lease(str(base)).micro_batches
            assert send(two, base, *unit, nonce=f"{token} {unit}") == "accepted"
        assert buffered(reducer, token, *[part.micro_batch for part in parts(reducer)])
        grant = one.lease(str(ZERO))
        if token == ONE:
            assert (grant.answer, grant.token) == ("leased", str(ZERO))
            assert send(one, ZERO, *grant.micro_batches, nonce="on the version before") == "accepted"
    assert (grant.answer, grant.token) == ("stale", str(TWO)), "an update would be late after one version more"
    agree(store, peers=False)
    assert one.lease(str(ONE)).answer == "stale", "others compute on the current version"
