"""Updates that two machines computed are compared before they count: who sends something else is found and banned."""

from collections.abc import Callable

import numpy as np
import pytest
from redis import Redis

from computeshare.codecs.messages import decode_update, encode_update
from computeshare.errors import Banned
from computeshare.protocol.worker_session import Grant
from computeshare.types import Blob
from tests.support.job_reducer import Hand, Job, Spoil
from tests.support.rounds import events

RNG = np.random.default_rng(0)


def noise(hand: Hand) -> Spoil:
    """In place of an update, noise of its length."""

    def spoil(message: list[Blob]) -> list[Blob]:
        update, buffers = decode_update(hand.up, message, hand.layout)
        other = RNG.normal(size=update.size).astype(np.float32)
        other *= np.linalg.norm(update) / np.linalg.norm(other)
        return [*encode_update(hand.up, other, buffers, hand.layout, 0)]

    return spoil


def run(job: Job, hands: dict[str, Hand], spoil: dict[str, Spoil]) -> dict[str, int]:
    """Until the job is done: each hand in turn leases and submits. Returns after how many units a worker was banned."""
    banned, units = dict[str, int](), dict.fromkeys(hands, 0)
    while (state := job.store.read()) and state.status == "running":
        grants: dict[str, Grant] = {}
        for name, hand in hands.items():
            if name not in banned:
                try:
                    grants[name] = hand.pull()
                except Banned:
                    banned[name] = units[name]
        for name, grant in grants.items():
            if grant.micro_batches:
                hands[name].send(grant, spoil.get(name, lambda message: message))
                units[name] += len(grant.micro_batches)
        job.reducer.advance()
    job.reducer.close()
    return banned


def outcomes(job: Job) -> list[str]:
    return [event["outcome"] for event in events(job.store, "audited")]


def three(job: Job) -> dict[str, Hand]:
    return {name: job.hand(name) for name in ("first", "second", "third")}


def test_audits_change_nothing_where_all_are_honest(start: Callable[..., Job], redis: Redis) -> None:
    plain, audited = start(), start(audit=1.0)
    expected = plain.finish(plain.hand("solo"))
    hands = three(audited)
    assert run(audited, hands, {}) == {}
    assert audited.digest() == expected
    assert len(outcomes(audited)) >= 6 and {*outcomes(audited)} == {"confirmed"}
    assert not redis.keys(f"{audited.store.keys.pattern()}copy") and not redis.exists(audited.store.keys.strikes())


@pytest.mark.parametrize("place", [0, 1, 2])
def test_noise_of_the_right_length_is_found_and_counts_for_nothing(start: Callable[..., Job], place: int) -> None:
    plain, audited = start(), start(audit=1.0)
    expected = plain.finish(plain.hand("solo"))
    hands = three(audited)
    liar = [*hands][place]
    banned = run(audited, hands, {liar: noise(hands[liar])})
    assert [*banned] == [liar] and banned[liar] <= 6
    [event] = events(audited.store, "banned")
    assert event["worker"] == liar and event["reason"].startswith("audit: its update for micro-batch")
    assert "mismatched" in outcomes(audited) and {*outcomes(audited)} <= {"mismatched", "confirmed", "undecided"}
    refused = {event["worker"] for event in events(audited.store, "refused")}
    assert refused <= {liar}
    if banned[liar] <= 3:  # found in its first round: nothing of it has counted
        assert audited.digest() == expected


def test_a_liar_is_found_though_few_units_are_audited(start: Callable[..., Job]) -> None:
    job = start(audit=0.2, micro_batches_per_round=6, micro_batch=8, rounds=60)
    hands = three(job)
    banned = run(job, hands, {"second": noise(hands["second"])})
    assert [*banned] == ["second"] and banned["second"] <= 60


def test_a_liar_that_leaves_before_the_comparison_is_banned(start: Callable[..., Job]) -> None:
    job = start(audit=1.0)
    hands = three(job)
    for name, grant in [(name, hand.pull()) for name, hand in hands.items()]:
        if grant.micro_batches:
            hands[name].send(grant, noise(hands[name]) if name == "first" else lambda message: message)
    hands["first"].session.leave("gone")
    run(job, {name: hand for name, hand in hands.items() if name != "first"}, {})
    assert {event["worker"] for event in events(job.store, "banned")} == {"first"}


def test_of_two_machines_nobody_can_tell_who_is_wrong(start: Callable[..., Job]) -> None:
    job = start(audit=1.0, rounds=2)
    hands = {name: job.hand(name) for name in ("first", "second")}
    assert run(job, hands, {"second": noise(hands["second"])}) == {}
    assert {*outcomes(job)} == {"undecided"} and events(job.store, "banned") == []


def test_workers_of_one_machine_do_not_audit_each_other(start: Callable[..., Job]) -> None:
    job = start(audit=1.0, rounds=3)
    hands = {name: job.hand(name) for name in ("0badc0de0001", "0badc0de0002")}
    assert run(job, hands, {"0badc0de0002": noise(hands["0badc0de0002"])}) == {}
    assert {*outcomes(job)} <= {"skipped"}


def test_a_copy_that_cannot_be_decoded_is_its_senders_fault(start: Callable[..., Job]) -> None:
    job = start(audit=1.0)
    hands = three(job)
    banned = run(job, hands, {"third": lambda message: [b"garbage", *message[1:]]})
    assert [*banned] == ["third"]


@pytest.mark.parametrize("who", ["before the dispute", "after it"])
def test_a_reducer_that_takes_over_goes_on_with_an_audit(start: Callable[..., Job], who: str) -> None:
    plain, job = start(), start(audit=1.0)
    expected = plain.finish(plain.hand("solo"))
    hands = three(job)
    grants = {name: hand.pull() for name, hand in hands.items()}
    for name, grant in grants.items():
        if grant.micro_batches:
            hands[name].send(grant, noise(hands[name]) if name == "first" else lambda message: message)
    if who == "after it":
        job.reducer.advance()
    job.reducer = job.new_reducer()
    assert [*run(job, hands, {"first": noise(hands["first"])})] == ["first"]
    assert job.digest() == expected
