"""What one worker may do to a job: shares, strikes, bans, and the names in the ledger; against a real server."""

import json

import pytest
from redis import Redis

from computeshare.errors import Banned
from computeshare.protocol.reducer_session import Claim
from computeshare.protocol.round_store import RoundStore
from tests.support.rounds import ONE, TWO, ZERO, Join, age, commit, events, free, late, send

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


def test_a_backup_task_counts_towards_the_share(claim: Claim, join: Join) -> None:
    slow, quick = join("slow", sharers=3), join("quick", sharers=3)
    slow.lease(str(ZERO)), quick.lease(str(ZERO))
    assert send(quick, ZERO, 2, nonce="half") == "accepted"
    late(claim)
    assert quick.lease(str(ZERO)).answer == "wait"  # one received, one leased
    assert join("third", sharers=3).lease(str(ZERO)).micro_batches in ((0, 1), (0, 3), (1, 3))


def test_a_lease_that_ran_out_does_not_count_towards_the_share(claim: Claim, join: Join) -> None:
    member = join("a", sharers=3)
    assert member.lease(str(ZERO)).micro_batches == (0, 1)
    age(claim, 3_600_000)
    assert member.lease(str(ZERO)).micro_batches == (2, 3)


def test_a_submission_above_the_share_is_not_counted(claim: Claim, join: Join) -> None:
    member = join("a", sharers=3)
    member.lease(str(ZERO))
    age(claim, 3_600_000)
    member.lease(str(ZERO))
    assert send(member, ZERO, 0, 1, 2, nonce="more") == "accepted"
    assert sorted(claim.progress()[1]) == [0, 1]
    assert send(member, ZERO, 2, 3, nonce="still more") == "lease_lost"


def test_the_share_is_of_the_round_at_hand_however_short(claim: Claim, join: Join) -> None:
    members = [join(name, sharers=3) for name in "abc"]
    for token, expected in ((ZERO, [(0, 1), (2, 3), ()]), (ONE, [(4, 5), (6, 7), ()])):
        grants = [member.lease(str(token)).micro_batches for member in members]
        assert grants == expected
        for member, grant in zip(members, grants, strict=True):
            if grant:
                assert send(member, token, *grant, nonce=f"{token} {grant}") == "accepted"
        if token == ZERO:
            assert commit(claim, ONE)
    assert commit(claim, TWO)  # the epoch's last round has two micro-batches: one each
    assert [member.lease(str(TWO)).micro_batches for member in members] == [(8,), (9,), ()]


def test_the_ledger_names_the_worker_that_submitted(claim: Claim, join: Join) -> None:
    member = join("a")
    member.lease(str(ZERO))
    member.submit(str(ZERO), "n", [(0, [b"update"], 0.25), (1, [b"longer update"], float("nan"))], {"worker": "b"})
    received = claim.progress()[1]
    assert {(part.worker, part.session, part.nonce) for part in received.values()} == {("a", member.session, "n")}
    assert (received[0].loss, received[0].size, received[1].size) == (0.25, 6, 13)
    assert received[1].loss != received[1].loss


@pytest.mark.parametrize("loss", [0.1, 2.302585092994046, 1e-300, float("inf"), float("-inf")])
def test_a_loss_arrives_bit_for_bit(claim: Claim, join: Join, loss: float) -> None:
    member = join("a")
    member.lease(str(ZERO))
    member.submit(str(ZERO), "n", [(0, [b"update"], loss)], {})
    assert abs(claim.progress()[1][0].loss) == abs(loss)


def test_a_loss_that_is_no_number_is_kept_as_one_that_is_not_finite(claim: Claim, join: Join) -> None:
    member = join("a")
    member.lease(str(ZERO))
    member.submit(str(ZERO), "n", [(0, [b"update"], '", "worker": "b')], {})  # type: ignore[list-item]
    assert claim.progress()[1][0].loss != claim.progress()[1][0].loss


# Strikes


def test_a_submission_is_one_strike_however_many_of_its_micro_batches_are_refused(
    redis: Redis, claim: Claim, join: Join
) -> None:
    liar = join("liar")
    liar.lease(str(ZERO))
    send(liar, ZERO, 0, 1, 2, 3, nonce="one")
    for part in claim.progress()[1].values():
        claim.refuse(ZERO, part, "checksum mismatch", "damaged")
    assert redis.hget(claim.keys.strikes(), "liar") == b"1"
    liar.lease(str(ZERO))
    send(liar, ZERO, 0, nonce="two")
    claim.refuse(ZERO, claim.progress()[1][0], "checksum mismatch", "damaged")
    assert redis.hget(claim.keys.strikes(), "liar") == b"2"


def test_a_blob_that_the_broker_lost_is_nobodys_strike(redis: Redis, claim: Claim, join: Join) -> None:
    member = join("a")
    member.lease(str(ZERO))
    send(member, ZERO, 0)
    assert claim.refuse(ZERO, claim.progress()[1][0], "the broker has lost the blob", "lost").sessions == 0
    assert not redis.exists(claim.keys.strikes()) and free(claim) == [b"0"]


def test_the_answer_to_a_refused_submission_is_remembered(redis: Redis, claim: Claim, join: Join) -> None:
    member = join("a")
    member.lease(str(ZERO))
    send(member, ZERO, 0, nonce="n")
    claim.refuse(ZERO, claim.progress()[1][0], "checksum mismatch", "damaged")
    assert b"1|refused" in redis.hvals(claim.keys.answers())
    assert send(member, ZERO, 0, nonce="n") == "duplicate"


# Bans


def ban(claim: Claim, worker: str) -> None:
    claim.redis.hset(claim.keys.banned(), worker, "for a test")
    claim.redis.hset(claim.keys.strikes(), worker, 5)
    claim.redis.hdel(claim.keys.sessions(), worker)


def test_a_banned_worker_that_asks_for_a_lease_is_told_so(claim: Claim, join: Join) -> None:
    member = join("liar")
    ban(claim, "liar")
    with pytest.raises(Banned, match="worker liar is banned"):
        member.lease(str(ZERO))


def test_a_ban_is_lifted_once_and_the_event_says_so(redis: Redis, claim: Claim, join: Join) -> None:
    assert not claim.lift_ban("liar")
    ban(claim, "liar")
    assert claim.lift_ban("liar") and not claim.lift_ban("liar")
    assert not redis.exists(claim.keys.banned(), claim.keys.strikes())
    assert events(claim, "unbanned") == [{"worker": "liar"}]
    join("liar")


def test_a_deleted_job_lifts_no_ban(redis: Redis, claim: Claim) -> None:
    ban(claim, "liar")
    redis.delete(claim.keys.spec())
    redis.delete(claim.keys.events())
    assert not claim.lift_ban("liar") and not redis.exists(claim.keys.events())


# Rejoining


def test_a_new_session_tells_what_it_freed_of_the_older_one(store: RoundStore, claim: Claim, join: Join) -> None:
    join("a", "old").lease(str(ZERO))
    join("a", "new")
    left = {"worker": "a", "session": "old", "reason": "a newer session has taken over"}
    assert events(store, "left") == [left | {"freed": [0, 1, 2, 3]}]
    entries = claim.redis.xrange(claim.keys.versions())
    assert entries[-1][1] == {b"freed": b"4"}  # type: ignore[index]
    join("a", "newest")  # held nothing: nothing to tell
    assert len(events(store, "left")) == 1


def test_a_nonce_with_a_quote_in_it_is_kept_as_it_is(claim: Claim, join: Join) -> None:
    member = join("a")
    member.lease(str(ZERO))
    member.submit(str(ZERO), 'n"', [(0, [b"update"], 0.5)], {})
    raw = claim.redis.hget(claim.keys.received(), "0")
    assert isinstance(raw, bytes) and json.loads(raw)["nonce"] == 'n"'
