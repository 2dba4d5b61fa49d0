"""Rounds that close without all of their micro-batches, against a real server."""

from dataclasses import replace

import pytest
from redis import Redis

from computeshare.protocol.reducer_session import Claim
from computeshare.protocol.round_store import RoundStore
from computeshare.protocol.worker_session import Member
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
def slow(claim: Claim, join: Join) -> Member:
    """Holds the lease on the round's first two micro-batches, while the other two have been received."""
    slow, quick = join("slow"), join("quick", backup=False)
    assert slow.lease(str(ZERO)).micro_batches == (0, 1)
    assert quick.lease(str(ZERO)).micro_batches == (2, 3)
    assert send(quick, ZERO, 2, 3, nonce="quick") == "accepted"
    return slow


def test_a_round_closes_once_enough_is_there_and_then_takes_no_more(claim: Claim, slow: Member) -> None:
    assert not claim.close(ZERO, 3) and not current(claim).closed
    assert claim.close(ZERO, 2) and current(claim).closed
    assert send(slow, ZERO, 0, 1) == "lease_lost"
    assert sorted(claim.progress()[1]) == [2, 3]
    assert events(claim, "closed") == [{"version": 0, "received": 2, "total": 4}]
    assert not claim.close(ZERO, 2)
    assert len(events(claim, "closed")) == 1


def test_what_a_closed_round_has_received_is_a_duplicate_still(claim: Claim, slow: Member, join: Join) -> None:
    late(claim)
    backup = join("backup", backup=True)
    assert backup.lease(str(ZERO)).micro_batches == (0, 1)
    assert send(backup, ZERO, 0, nonce="backup") == "accepted"
    assert claim.close(ZERO, 3)
    assert send(slow, ZERO, 0, nonce="late") == "duplicate"


def test_a_closed_round_gives_no_lease(claim: Claim, slow: Member, join: Join) -> None:
    assert claim.close(ZERO, 2)
    slow.leave("gone")
    late(claim)
    grant = join("other").lease(str(ZERO))
    assert (grant.answer, grant.micro_batches) == ("wait", ())


def test_only_the_active_reducer_closes_the_current_round(redis: Redis, claim: Claim, slow: Member) -> None:
    assert not claim.close(ONE, 2)
    assert claim.renew(0)
    other = Claim(redis, claim.job_id, "other")
    assert other.claim("host", 2, 60_000)
    assert not claim.close(ZERO, 2)
    assert other.close(ZERO, 2)


def test_a_paused_round_is_not_closed(store: RoundStore, claim: Claim, slow: Member) -> None:
    store.pause()
    assert not claim.close(ZERO, 2)


def test_a_refusal_opens_a_closed_round_so_that_the_rest_can_come(claim: Claim, slow: Member) -> None:
    assert claim.close(ZERO, 2)
    claim.refuse(ZERO, claim.progress()[1][2], "checksum mismatch", "damaged")
    assert not current(claim).closed
    assert send(slow, ZERO, 0, 1) == "accepted"
    know(claim, slow=1, quick=1)
    assert slow.lease(str(ZERO)).micro_batches == (2,)


def test_what_is_missing_comes_first_in_the_next_round(claim: Claim, slow: Member, join: Join) -> None:
    assert claim.close(ZERO, 2) and commit(claim, ONE, carried=(0, 1))
    state = current(claim)
    assert (state.carried, state.first, state.count, state.total, state.closed) == ((0, 1), 4, 4, 6, False)
    assert state.units == [0, 1, 4, 5, 6, 7]
    assert free(claim) == [b"0", b"1"]
    slow.leave("gone")
    assert join("quick").lease(str(ONE)).micro_batches == (0, 1, 4, 5, 6, 7)


def test_a_round_with_carried_micro_batches_is_full_with_all_of_them(
    redis: Redis, claim: Claim, slow: Member, join: Join
) -> None:
    assert claim.close(ZERO, 2) and commit(claim, ONE, carried=(0, 1))
    slow.leave("gone")
    quick = join("quick")
    quick.lease(str(ONE))
    assert send(quick, ONE, 4, 5, 6, 7, nonce="fresh") == "accepted"
    assert redis.llen(claim.keys.full()) == 0
    assert send(quick, ONE, 0, 1, nonce="carried") == "accepted"
    assert redis.llen(claim.keys.full()) == 1
    assert claim.close(ONE, 6) and events(claim, "closed")[-1] == {"version": 1, "received": 6, "total": 6}
    assert commit(claim, TWO) and current(claim).carried == ()


def test_a_round_with_carried_micro_batches_is_shared_out_with_them(claim: Claim, slow: Member, join: Join) -> None:
    assert claim.close(ZERO, 2) and commit(claim, ONE, carried=(0, 1))
    assert slow.lease(str(ONE)).micro_batches == (0, 1, 4)
    given = join("quick").lease(str(ONE)).micro_batches  # one is left to the other, where that is expected back sooner
    assert given in ((5, 6), (5, 6, 7))


def test_a_late_submission_of_what_was_carried_is_stale(claim: Claim, slow: Member) -> None:
    assert claim.close(ZERO, 2) and commit(claim, ONE, carried=(0, 1))
    assert slow.lease(str(ONE)).micro_batches[:2] == (0, 1)
    assert send(slow, ZERO, 0, 1) == "stale"
    assert claim.progress()[1] == {}


def test_the_list_that_made_a_version_is_kept_for_one_who_takes_over(claim: Claim, slow: Member) -> None:
    assert claim.close(ZERO, 2) and commit(claim, ONE, carried=(0, 1), keep=False)
    counted = claim.counted(current(claim))
    assert counted == of(ZERO, [2, 3])
    assert claim.updates(of(ZERO, [2, 3]), range(1)) == [[b"update"]] * 2
    assert claim.store_state(ZERO, counted, ONE, [b"state 1"])
    assert claim.updates(of(ZERO, [2, 3]), range(1)) == [None] * 2


def test_a_version_of_updates_that_the_broker_does_not_hold_is_not_committed(claim: Claim, join: Join) -> None:
    fill(join, claim)
    state, read = current(claim), parts(claim)
    entry = claim.redis.hget(claim.keys.received(), "3")
    assert isinstance(entry, bytes)
    claim.redis.hdel(claim.keys.received(), "3")  # it went back to what it was before
    assert not claim.commit(state, read, ONE, [b"weights"], PLAN.round(1), {})
    claim.redis.hset(claim.keys.received(), "3", entry.replace(b"1.0.0000", b"another "))  # then another sent it
    assert not claim.commit(state, read, ONE, [b"weights"], PLAN.round(1), {})
    assert not claim.commit(state, read[:3], ONE, [b"weights"], PLAN.round(1), {})
    assert current(claim).token == ZERO
    claim.redis.hset(claim.keys.received(), "3", entry)
    assert claim.commit(state, read, ONE, [b"weights"], PLAN.round(1), {})


def test_a_version_is_not_committed_on_one_whose_state_the_broker_lost(claim: Claim, join: Join) -> None:
    fill(join, claim)
    claim.redis.delete(claim.keys.state(str(ZERO)))  # nobody who takes over could repeat the step
    assert not commit(claim, ONE) and current(claim).token == ZERO


def test_a_job_is_restored_with_what_its_checkpoint_carried(redis: Redis, store: RoundStore) -> None:
    claim = Claim(redis, store.job_id, "first")
    assert claim.claim("host", 1, 60_000)
    assert claim.open(ONE, [b"weights 1"], [b"state 1"], PLAN.round(1, (1, 3)), {})
    assert current(claim).units == [1, 3, 4, 5, 6, 7]
    member = Member(redis, store.job_id, "a", "a")
    assert take_seat(member) == "running"
    assert member.lease(str(ONE)).micro_batches == (1, 3, 4, 5, 6, 7)


def test_only_the_active_reducer_gives_up_the_current_round(redis: Redis, claim: Claim, join: Join) -> None:
    k = claim.keys
    member, state = join("a"), current(claim)
    grant = member.lease(str(ZERO))
    assert send(member, ZERO, *grant.micro_batches[:1]) == "accepted"
    assert not claim.discard(replace(state, token=ONE))
    assert claim.renew(0)
    other = Claim(redis, claim.job_id, "other")
    assert other.claim("host", 2, 60_000)
    assert not claim.discard(state) and claim.read() is not None
    assert other.discard(state) and other.read() is None
    assert not redis.exists(k.leases(), k.received(), k.weights(str(ZERO)), k.state(str(ZERO)))
    assert other.open(THREE, [b"w"], [b"s"], PLAN.round(3), {})
