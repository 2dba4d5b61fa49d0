"""Rounds made of whatever comes first, leases that are kept, messages of parts, and versions as differences."""

from dataclasses import replace
from typing import Any

import pytest
from redis import Redis

from computeshare.protocol import channel as channel_module
from computeshare.protocol import reducer_session
from computeshare.protocol.reducer_session import Claim, Link
from computeshare.protocol.round_store import RoundStore
from computeshare.protocol.worker_session import Member
from computeshare.types import Token
from tests.support.rounds import (
    ONE,
    PLAN,
    THREE,
    TWO,
    ZERO,
    Join,
    age,
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
def claim(redis: Redis, store: RoundStore) -> Claim:
    """The active reducer of a job whose versions are made of the micro-batches that come first."""
    return opened(redis, store, WINDOW, recent=2)


def buffered(claim: Claim, token: Token, *numbers: int) -> bool:
    """Commit a version made of these micro-batches."""
    base, counted = current(claim), [part for part in parts(claim) if part.micro_batch in numbers]
    following = PLAN.window(token.version)
    if following.epoch == PLAN.round(base.version).epoch:
        following = replace(following, first=base.first, count=base.count)
    done = claim.commit(base, counted, token, [b"weights"], following, {"version": token.version})
    if done:
        claim.store_state(base.token, [(part.base, part.micro_batch) for part in counted], token, [b"state"])
    return done


def lease(member: Member, token: Token) -> tuple[int, ...]:
    return member.lease(str(token)).micro_batches


def is_full(claim: Claim) -> bool:
    return bool(claim.redis.llen(claim.keys.full()))


@pytest.fixture
def begun(claim: Claim, join: Join) -> tuple[Member, Member]:
    """A slow worker with a lease on 0 and 1, and a quick one whose 2, 3, 4 and 5 have made version 1."""
    slow, quick = join("slow"), join("quick")
    assert (lease(slow, ZERO), lease(quick, ZERO), lease(quick, ZERO)) == ((0, 1), (2, 3), (4, 5))
    assert send(quick, ZERO, 2, 3, 4, nonce="three") == "accepted" and not is_full(claim)
    assert send(quick, ZERO, 5, nonce="fourth") == "accepted" and is_full(claim)
    assert buffered(claim, ONE, 2, 3, 4, 5)
    return slow, quick


def test_what_was_computed_on_the_version_before_counts_in_the_next(claim: Claim, begun: tuple[Member, Member]) -> None:
    slow, quick = begun
    assert not is_full(claim) and parts(claim) == []
    assert lease(quick, ONE) == (6, 7)  # where the leases had got to
    assert send(slow, ZERO, 0, 1) == "accepted"
    assert send(quick, ONE, 6, 7, nonce="own") == "accepted" and is_full(claim)
    assert {part.micro_batch: part.base for part in parts(claim)} == {
        **dict.fromkeys((0, 1), str(ZERO)),
        **dict.fromkeys((6, 7), str(ONE)),
    }
    base = current(claim)
    assert buffered(claim, TWO, 0, 1, 6, 7)
    state = current(claim)
    assert state.base == base.token and claim.counted(state) == [*of(ZERO, [0, 1]), *of(ONE, [6, 7])]
    assert claim.redis.lrange(claim.keys.recent(), 0, -1) == [str(TWO).encode(), str(ONE).encode()]


def test_what_comes_too_late_is_stale_and_its_lease_is_handed_back(claim: Claim, begun: tuple[Member, Member]) -> None:
    slow, quick = begun
    assert send(quick, ONE, *lease(quick, ONE), *lease(quick, ONE), nonce="more") == "accepted"
    assert buffered(claim, TWO, 6, 7, 8, 9)
    assert send(slow, ZERO, 0, 1) == "stale" and free(claim) == [b"0", b"1"]
    assert lease(quick, TWO) == (0,)  # two make the epoch's last version


def test_a_backup_that_comes_too_late_leaves_the_first_lease_alone(claim: Claim, begun: tuple[Member, Member]) -> None:
    slow, quick = begun
    assert (lease(quick, ONE), lease(quick, ONE)) == ((6, 7), (8, 9))
    age(claim, 1500)  # slow by now, but not expired
    assert lease(quick, ONE) == (0, 1)
    assert send(quick, ONE, 6, 7, 8, 9, nonce="more") == "accepted"
    assert buffered(claim, TWO, 6, 7, 8, 9)
    claim.redis.lrem(claim.keys.recent(), 0, str(ONE))  # it is too old by now
    assert send(quick, ONE, 0, 1, nonce="late") == "stale"
    assert free(claim) == [] and not claim.redis.exists(claim.keys.backups())
    assert sorted(claim.redis.hkeys(claim.keys.leases())) == [b"0", b"1"]  # type: ignore[arg-type]
    assert send(slow, TWO, 0, 1) == "accepted"


def test_what_comes_beyond_a_version_stays_for_the_next(claim: Claim, join: Join) -> None:
    member = join("only")
    assert (lease(member, ZERO), lease(member, ZERO)) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert send(member, ZERO, *range(8)) == "accepted"
    assert buffered(claim, ONE, 4, 5, 6, 7)
    assert [part.micro_batch for part in parts(claim)] == [0, 1, 2, 3] and is_full(claim)
    assert claim.updates(of(ZERO, [0, 4]), range(1)) == [[b"update"], None]
    assert buffered(claim, TWO, 0, 1, 2, 3)
    assert not is_full(claim) and (current(claim).needed, current(claim).total) == (2, 10)


def test_nobody_computes_more_on_a_version_once_the_next_is_on_its_way(claim: Claim, join: Join) -> None:
    quick, slow = join("quick"), join("slow")
    assert send(quick, ZERO, *lease(quick, ZERO), *lease(quick, ZERO)) == "accepted"
    assert [member.lease(str(ZERO)).answer for member in (quick, slow)] == ["wait", "wait"]
    assert buffered(claim, ONE, *range(4)) and lease(slow, ONE) == (4, 5)


def test_what_would_be_too_late_once_its_turn_comes_is_handed_back(claim: Claim, join: Join) -> None:
    member = join("only")
    numbers = [*lease(member, ZERO), *lease(member, ZERO), *lease(member, ZERO)]
    assert numbers == list(range(10))
    assert send(member, ZERO, *numbers) == "accepted"  # four for the next version, four for the one after that
    assert [part.micro_batch for part in parts(claim)] == list(range(8)) and free(claim) == [b"8", b"9"]
    assert events(claim, "submission")[-1]["late"] == [8, 9]
    assert not claim.redis.exists(claim.keys.leases())
    came = [part.at for part in parts(claim)]
    assert came == sorted(set(came)) and abs(came[0] - claim.now_ms()) < 60_000
    assert send(member, ZERO, *numbers, nonce="again") == "duplicate"
    assert buffered(claim, ONE, 0, 1, 2, 3) and buffered(claim, TWO, 4, 5, 6, 7)
    assert lease(member, TWO) == (8, 9)


def test_a_submission_all_of_which_is_too_late_is_stale(claim: Claim, join: Join) -> None:
    slow, quick = join("slow"), join("quick")
    assert lease(slow, ZERO) == (0, 1)
    numbers = [m for _ in range(4) for m in lease(quick, ZERO)]
    assert send(quick, ZERO, *numbers) == "accepted" and len(parts(claim)) == 8
    assert send(slow, ZERO, 0, 1, nonce="slow") == "stale" and free(claim) == [b"0", b"1"]


def test_an_update_that_is_late_already_has_less_time_to_wait(claim: Claim, begun: tuple[Member, Member]) -> None:
    slow, quick = begun
    assert send(quick, ONE, *lease(quick, ONE), *lease(quick, ONE), nonce="full") == "accepted"
    assert send(slow, ZERO, 0, 1) == "stale"  # one version late, and two once its turn comes


def test_a_backup_that_counts_takes_its_micro_batch_from_those_that_were_handed_back(
    claim: Claim, begun: tuple[Member, Member]
) -> None:
    slow, quick = begun
    assert (lease(quick, ONE), lease(quick, ONE)) == ((6, 7), (8, 9))
    age(claim, 1500)
    assert lease(quick, ONE) == (0, 1)  # in case that the slow one never comes
    slow.leave("too slow")
    assert free(claim) == [b"0", b"1"]
    assert send(quick, ONE, 0, 1, 6, 7) == "accepted" and free(claim) == []
    assert buffered(claim, TWO, 0, 1, 6, 7)
    assert sorted(claim.redis.hkeys(claim.keys.leases())) == [b"8", b"9"]  # type: ignore[arg-type]
    assert lease(quick, TWO) == ()


def test_who_sent_what_is_not_finite_is_remembered_beyond_the_next_version(
    claim: Claim, begun: tuple[Member, Member]
) -> None:
    slow, quick = begun
    assert send(slow, ZERO, 0, 1) == "accepted"
    found = claim.refuse(ONE, claim.progress()[1][0], "not finite", "not_finite")
    claim.refuse(ONE, claim.progress()[1][1], "not finite", "not_finite")
    assert (found.sessions, found.times) == (1, 1)
    assert send(quick, ONE, *lease(quick, ONE), *lease(quick, ONE), *lease(quick, ONE), nonce="all") == "accepted"
    assert 0 in {part.micro_batch for part in parts(claim)}
    counted = [part.micro_batch for part in parts(claim)]
    assert buffered(claim, TWO, *counted[1:5]) and claim.redis.hkeys(claim.keys.suspects()) == [b"0"]
    found = claim.refuse(TWO, claim.progress()[1][0], "not finite", "not_finite")
    assert (found.sessions, found.times) == (2, 2)  # which nobody is to blame for


def test_more_than_the_jobs_last_version_needs_does_not_keep_it_from_being_made(claim: Claim, join: Join) -> None:
    member = join("only")
    assert send(member, ZERO, *lease(member, ZERO), *lease(member, ZERO)) == "accepted"
    nothing = replace(PLAN.window(1), count=0, wanted=None)
    counted = parts(claim)[:4]
    assert claim.commit(current(claim), counted, ONE, [b"weights"], nothing, {"version": 1})
    assert current(claim).status == "finished"


def test_a_restored_window_is_what_was_not_counted(redis: Redis, store: RoundStore, job_id: str) -> None:
    claim = Claim(redis, store.job_id, "first")
    assert claim.claim("host", 1, 60_000)
    pending = replace(PLAN.window(1).behind(10), carried=(0, 3, 5, 7, 8, 9))  # all were leased when it was written
    assert pending.count == 0
    assert claim.open(ONE, [b"weights 1"], [b"state 1"], pending, {}, recent=2)
    assert current(claim).status == "running" and current(claim).units == [0, 3, 5, 7, 8, 9]
    member = Member(redis, job_id, "a", "a")
    take_seat(member)
    numbers = lease(member, ONE)
    assert numbers == (0, 3, 5, 7) and send(member, ONE, *numbers) == "accepted"
    following = replace(PLAN.window(2), first=pending.first, count=0, carried=pending.carried)
    assert claim.commit(current(claim), parts(claim), TWO, [b"weights"], following, {"version": 2})
    assert current(claim).status == "running" and lease(member, TWO) == (8, 9)


def test_a_repeated_submission_is_told_what_became_of_the_first(claim: Claim, join: Join) -> None:
    member = join("only")
    numbers = lease(member, ZERO)
    updates = [(m, [b"update"], 0.5) for m in numbers]
    first, again = (member.submit(str(ZERO), "nonce", updates, {}) for _ in range(2))
    assert (first.outcome, first.before, again.outcome, again.before) == ("accepted", "", "duplicate", "accepted")


def test_the_last_version_of_an_epoch_takes_what_is_left_and_the_next_begins_anew(claim: Claim, join: Join) -> None:
    member = join("only")
    for token, following in ((ZERO, ONE), (ONE, TWO), (TWO, THREE)):
        numbers = lease(member, token)
        assert send(member, token, *numbers, nonce=str(token)) == "accepted"
        assert buffered(claim, following, *numbers)
    assert current(claim).units == list(range(10, 20)) and parts(claim) == []
    assert lease(member, THREE) == (10, 11, 12, 13)


def test_a_checkpoint_knows_what_is_not_counted_yet(claim: Claim, begun: tuple[Member, Member]) -> None:
    slow, _ = begun
    assert claim.pending(ONE) == (6, [0, 1])
    assert claim.pending(ZERO) is None
    slow.leave("bye")
    assert claim.pending(ONE) == (6, [0, 1])


def test_a_lease_is_kept_for_as_long_as_its_worker_says(claim: Claim, join: Join) -> None:
    a, b = join("a"), join("b")
    assert (lease(a, ZERO), lease(b, ZERO)) == ((0, 1), (2, 3))
    age(claim, 60_000)
    assert a.extend([0, 2]) == "running"
    kept = expiries(claim)
    now = claim.now_ms()
    assert now + 4000 < kept[0] < now + 6000  # its own, and what it named
    assert max(kept[1], kept[2], kept[3]) < now
    assert send(a, ZERO, 0) == "accepted"


def test_what_is_staged_is_kept_with_its_lease(claim: Claim, join: Join) -> None:
    member = join("a")
    lease(member, ZERO)
    member.stage("nonce", 0, 0, b"part")
    key = claim.keys.staged("nonce:0")
    claim.redis.expire(key, 5)
    assert member.extend([0]) == "running" and claim.redis.ttl(key) == 5
    assert member.extend([0], "nonce") == "running" and int(claim.redis.ttl(key)) > 500  # type: ignore[arg-type]


def test_a_long_lease_is_not_made_shorter(claim: Claim, join: Join) -> None:
    member = join("a")
    lease(member, ZERO)
    before = expiries(claim)
    assert member.extend(range(4)) == "running" and expiries(claim) == before


def test_a_backup_is_kept_too(claim: Claim, join: Join) -> None:
    slow, quick = join("slow"), join("quick")
    assert lease(slow, ZERO) == (0, 1)
    assert send(quick, ZERO, *lease(quick, ZERO)) == "accepted"  # its speed is known from now on
    while 0 not in lease(quick, ZERO):
        age(claim, 400)
    age(claim, 60_000)
    assert quick.extend([0, 1]) == "running"
    kept = claim.redis.hgetall(claim.keys.backups())
    assert {bytes(m): int(held.split(b"|")[1]) > claim.now_ms() for m, held in kept.items()} == {b"0": True, b"1": True}  # type: ignore[union-attr]
    assert max(expiries(claim).values()) < claim.now_ms()


def test_work_that_others_have_done_or_taken_is_lost(claim: Claim, join: Join) -> None:
    slow, quick = join("slow"), join("quick")
    assert lease(slow, ZERO) == (0, 1)
    assert send(quick, ZERO, *lease(quick, ZERO)) == "accepted"
    while 0 not in lease(quick, ZERO):
        age(claim, 400)
    assert (slow.extend([0, 1]), quick.extend([0, 1])) == ("running", "running")
    assert send(quick, ZERO, 0, nonce="first") == "accepted"
    assert (slow.extend([0]), slow.extend([0, 1])) == ("lost", "running")
    assert send(quick, ZERO, 1, nonce="second") == "accepted"
    assert slow.extend([0, 1]) == "lost" and slow.extend(()) == "running"


def test_a_session_that_was_replaced_keeps_no_lease(claim: Claim, join: Join, store: RoundStore) -> None:
    old = join("a", "one")
    lease(old, ZERO)
    join("a", "two")
    assert old.extend([0]) == "fenced"
    store.pause()
    assert join_again(claim).extend([0]) == "paused"
    store.purge()
    assert old.extend([0]) == "gone"


def join_again(claim: Claim) -> Member:
    return Member(claim.redis, claim.job_id, "a", "two")


def expiries(claim: Claim) -> dict[int, int]:
    held: Any = claim.redis.hgetall(claim.keys.leases())
    return {int(m): int(lease.split(b"|")[1]) for m, lease in held.items()}


@pytest.mark.parametrize(
    "other", [[b"one"], [b"one", b"two", b"three"], [b"one", b""]], ids=["too few", "too many", "empty"]
)
def test_a_message_that_has_not_all_its_parts_or_others_is_refused(
    claim: Claim, join: Join, other: list[bytes]
) -> None:
    member = join("a")
    lease(member, ZERO)
    sent = [(0, [b"one", b"two"], 0.5), (1, other, 0.5)]
    assert member.submit(str(ZERO), "nonce", sent, {}).outcome == "accepted"
    assert [(part.micro_batch, part.size) for part in parts(claim)] == [(0, 6)]
    assert 1 in lease(member, ZERO)  # it was handed back
    assert member.submit(str(ZERO), "again", [(1, [b"one", b"two"], 0.5)], {}).outcome == "accepted"


def test_what_was_left_of_an_opening_before_is_forgotten(redis: Redis, store: RoundStore) -> None:
    redis.lpush(store.keys.recent(), str(TWO))
    redis.rpush(store.keys.chain(), str(TWO))
    claim = Claim(redis, store.job_id, "first")
    assert claim.claim("host", 1, 60_000)
    assert claim.open(ZERO, [b"weights 0"], [b"state 0"], PLAN.round(0), {})
    assert redis.lrange(store.keys.recent(), 0, -1) == [str(ZERO).encode()]
    assert claim.chain() == ([str(ZERO)], str(ZERO))


def link(claim: Claim, member: Member, token: Token, link: Link) -> None:
    """Commit the window's next version as a difference."""
    numbers = lease(member, current(claim).token)
    assert send(member, current(claim).token, *numbers, nonce=f"link {token}") == "accepted"
    base, counted = current(claim), parts(claim)
    following = replace(PLAN.window(token.version), first=base.first, count=base.count)
    delta = f"to {token.version}".encode()
    assert claim.commit(base, counted, token, [delta], following, {"version": token.version}, link=link)
    claim.store_state(base.token, [(part.base, part.micro_batch) for part in counted], token, [b"state"])


def test_a_chain_leads_from_a_snapshot_or_from_what_is_at_hand(claim: Claim, join: Join) -> None:
    member = join("a")
    link(claim, member, ONE, Link())
    link(claim, member, TWO, Link())
    way, grant = member.follow("", str(TWO), 1)
    assert way is not None and (way.whole, way.deltas) == ([b"weights 0"], [[b"to 1"], [b"to 2"]])
    assert grant.answer == "leased"
    way, _ = member.follow(str(ONE), str(TWO), 1)
    assert way is not None and (way.whole, way.deltas) == (None, [[b"to 2"]])
    way, _ = member.follow("", str(THREE), 1)
    assert way is None


def test_a_large_difference_outlives_the_sending_of_a_large_snapshot(
    claim: Claim, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (reducer_session, channel_module):
        monkeypatch.setattr(module, "AT_ONCE_BYTES", 10)
    monkeypatch.setattr(channel_module, "LARGE", 1)
    member = join("a")
    numbers = lease(member, current(claim).token)
    assert send(member, current(claim).token, *numbers, nonce="one") == "accepted"
    base, counted = current(claim), parts(claim)
    following = replace(PLAN.window(1), first=base.first, count=base.count)
    assert claim.begin([b"twelve bytes", b"more"]) == ()
    (staged,) = claim.redis.keys(claim.keys.staged("*weights*"))
    lives = []

    def exchanged(channel: Any, commands: Any, into: Any = None, **other: Any) -> Any:
        if commands[0][0] == "HSET":  # a part of the snapshot has just been sent, and long before that the difference
            claim.redis.expire(staged, 5)
        replies = exchange(channel, commands, into, **other)
        lives.append(claim.redis.ttl(staged))
        return replies

    exchange = channel_module.Channel.exchange
    monkeypatch.setattr(channel_module.Channel, "exchange", exchanged)
    whole = Link([b"a snapshot", b"in two parts"], kept=1)
    assert claim.commit(base, counted, ONE, (), following, {"version": 1}, link=whole)
    assert len(lives) > 4 and min(lives[:-1]) > 100
    way, _ = member.follow(str(ZERO), str(ONE), 2, [bytearray(50), bytearray(50)])
    assert way is not None and (way.whole, way.deltas) == (None, [[b"twelve bytes", b"more"]])


def test_a_snapshot_lets_go_of_what_lies_before_the_last_one(claim: Claim, join: Join) -> None:
    member, k = join("a"), claim.keys
    link(claim, member, ONE, Link([b"weights 1"], kept=1))
    assert claim.chain() == ([str(ZERO), str(ONE)], str(ONE))
    assert claim.redis.ttl(k.weights(str(ONE))) == -1 and claim.redis.ttl(k.delta(str(ONE))) == -1
    link(claim, member, TWO, Link([b"weights 2"], kept=1, outdated=[ZERO]))
    assert claim.chain() == ([str(ONE), str(TWO)], str(TWO))
    assert not claim.redis.exists(k.weights(str(ZERO)))
    way, _ = member.follow("", str(TWO), 1)
    assert way is not None and (way.whole, way.deltas) == ([b"weights 2"], [])
    way, _ = member.follow(str(ONE), str(TWO), 1)
    assert way is not None and (way.whole, way.deltas) == (None, [[b"to 2"]])


def test_a_whole_round_is_not_a_window(redis: Redis, store: RoundStore, job_id: str) -> None:
    claim = Claim(redis, store.job_id, "first")
    assert claim.claim("host", 1, 60_000) and claim.open(ZERO, [b"w"], [b"s"], PLAN.round(0), {})
    member = Member(redis, job_id, "a", "a")
    take_seat(member)
    assert send(member, ZERO, *lease(member, ZERO)) == "accepted"
    counted = parts(claim)
    assert not claim.commit(current(claim), counted[:2], ONE, [b"w"], PLAN.round(1), {})
    assert commit(claim, ONE)
