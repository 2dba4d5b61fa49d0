"""Updates that two machines computed are compared before they count: who sends something else is found and banned."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis import Redis

from computeshare.codecs.messages import decode_update, encode_update
from computeshare.errors import Banned
from computeshare.protocol.worker_session import Grant
from computeshare.reducer.audits import outliers
from computeshare.tasks.registry import task_of
from computeshare.types import Blob
from tests.support.job_reducer import Hand, Job, Spoil, Worker
from tests.support.rounds import events

pytestmark = pytest.mark.slow

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


@pytest.mark.long
def test_a_share_of_two_percent_finds_a_liar_within_150_units_in_19_of_20_jobs(start: Callable[..., Job]) -> None:
    """15 of 20 are asked for: with a probability of 0.95 each, fewer come in one run of 3,000."""
    found = 0
    for _ in range(20):
        job = start(audit=0.02, micro_batches_per_round=6, micro_batch=8, rounds=80)
        hands = three(job)
        found += run(job, hands, {"second": noise(hands["second"])}).get("second", 1000) <= 150
    assert found >= 15


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


def test_a_dispute_that_a_liar_was_to_decide_is_decided_by_another_machine(start: Callable[..., Job]) -> None:
    plain, job = start(micro_batches_per_round=4), start(audit=1e-9, micro_batches_per_round=4)
    hands = {name: job.hand(name) for name in HANDS[:4]}
    liars = {name: changed(hands[name], -1) for name in ("first", "second")}
    grants = {name: hand.pull() for name, hand in hands.items()}
    assert [grant.micro_batches for grant in grants.values()] == [(0,), (1,), (2,), (3,)]
    for unit, copier in enumerate(("third", "fourth")):
        copy_lease(job, hands[copier], unit)
        grants[copier] = replace(grants[copier], micro_batches=(unit + 2, unit))
    for name, grant in grants.items():
        assert hands[name].send(grant, liars.get(name, lambda message: message)) == "accepted"
    job.reducer.advance()
    for name, unit in (("first", 1), ("fourth", 0)):  # each decides the dispute that it is no party to
        grant = hands[name].pull()
        assert grant.micro_batches == (unit,)
        assert hands[name].send(grant, liars.get(name, lambda message: message)) == "accepted"
    job.reducer.advance()
    assert [one["worker"] for one in events(job.store, "banned")] == ["first"]
    del hands["first"]
    assert [*run(job, hands, liars)] == ["second"]
    assert outcomes(job) == ["mismatched", "mismatched"]
    assert job.digest() == plain.finish(plain.hand("solo"))


# Suspicions

HANDS = ("first", "second", "third", "fourth", "fifth", "sixth")
LOCAL: dict[str, Any] = {"kind": "local", "replicas": 5, "inner_steps": 24}


def local(start: Callable[..., Job], combine: str = "mean", audit: float = 1e-9) -> tuple[Job, dict[str, Hand]]:
    """A job with `local`, of which next to no unit is audited unless it is suspected, and six machines."""
    fields: dict[str, Any] = {"strategy": {**LOCAL, "combine": combine}, "micro_batch": 6, "rounds": 4}
    workers = {"min": 1 if combine == "mean" else 5, "max": 6}
    job = start(**fields, optimizer=None, audit=audit, workers=workers)
    return job, {name: job.hand(name) for name in HANDS}


def changed(hand: Hand, factor: float) -> Spoil:
    """An update, multiplied."""

    def spoil(message: list[Blob]) -> list[Blob]:
        update, buffers = decode_update(hand.up, message, hand.layout)
        return [*encode_update(hand.up, update * np.float32(factor), buffers, hand.layout, 0)]

    return spoil


def honest(start: Callable[..., Job], combine: str = "mean") -> str:
    """The last version where nobody lies and nothing is audited."""
    job, hands = local(start, combine, 0)
    assert run(job, hands, {}) == {}
    return job.digest()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("liar", ["first", "fourth"])
@pytest.mark.parametrize("factor", [-1, 1000])
@pytest.mark.parametrize("combine", ["mean", "huber"])
def test_a_suspected_lie_is_replaced_before_the_version_is_made(
    start: Callable[..., Job], combine: str, factor: float, liar: str
) -> None:
    expected = honest(start, combine)
    job, hands = local(start, combine)
    assert [*run(job, hands, {liar: changed(hands[liar], factor)})] == [liar]
    assert job.digest() == expected
    told = events(job.store, "suspected")
    assert told[0] == {"version": 0, "micro_batch": told[0]["micro_batch"], "worker": liar, "outcome": "asked"}
    assert "mismatched" in outcomes(job) and {*outcomes(job)} <= {"mismatched", "confirmed"}
    assert not job.redis.exists(job.store.keys.disputes(), job.store.keys.copies(), job.store.keys.audits())


def test_a_reducer_that_takes_over_goes_on_with_a_suspicion(start: Callable[..., Job]) -> None:
    expected = honest(start)
    job, hands = local(start)
    spoiled = {"second": changed(hands["second"], -1)}
    for name, grant in [(name, hand.pull()) for name, hand in hands.items()]:
        if grant.micro_batches:
            hands[name].send(grant, spoiled.get(name, lambda message: message))
    job.reducer.advance()
    assert [one["outcome"] for one in events(job.store, "suspected")] == ["asked"]
    job.reducer = job.new_reducer()
    assert [*run(job, hands, spoiled)] == ["second"]
    assert job.digest() == expected


def test_honest_updates_are_cleared_and_suspected_ever_more_seldom(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = honest(start)
    monkeypatch.setattr(outliers, "AWAY", 2.0)  # all are suspected
    job, hands = local(start)
    assert run(job, hands, {}) == {}
    assert job.digest() == expected
    told = events(job.store, "suspected")
    asked = [one["worker"] for one in told if one["outcome"] == "asked"]
    rounds = {(one["worker"], one["version"]) for one in told if one["outcome"] == "asked"}
    cleared = [one["worker"] for one in told if one["outcome"] == "confirmed"]
    assert sorted(cleared) == sorted(asked) and len(told) == 2 * len(asked)
    assert len(asked) >= 2 and len(rounds) == len({*asked})  # 2 % of a machine's units, and those of a round more
    assert outcomes(job) == ["confirmed"] * len(asked)
    assert events(job.store, "banned") == events(job.store, "refused") == []


def test_a_machine_of_its_own_kind_is_suspected_in_vain(start: Callable[..., Job]) -> None:
    job, hands = local(start)
    job.redis.hset(job.store.keys.kinds(), "first", "another kind")
    assert run(job, hands, {"first": changed(hands["first"], -1)}) == {}
    told = events(job.store, "suspected")
    assert {"first": "alone"} in [{one["worker"]: one["outcome"]} for one in told]
    assert [one["worker"] for one in told].count("first") == 1 and "mismatched" not in outcomes(job)


def test_one_of_four_replicas_of_a_gpt_lies_in_vain(start: Callable[..., Job], shakespeare_dir: Path) -> None:
    size = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32}
    inner = {"name": "AdamW", "lr": 1e-3, "betas": [0.9, 0.99]}
    fields: dict[str, Any] = {"dataset": "tinyshakespeare", "model": "gpt", "model_args": size, "clip_norm": 1.0}
    fields["strategy"] = {"kind": "local", "replicas": 4, "inner_steps": 25, "inner_optimizer": inner}

    def trained(audit: float, liar: str = "") -> tuple[Job, dict[str, int]]:
        job = start(**fields, micro_batch=6, rounds=3, optimizer=None, audit=audit)
        instances = {name: task_of(job.spec).instance(0, "train", shakespeare_dir) for name in HANDS[:4]}
        hands = {name: job.hand(name, instance) for name, instance in instances.items()}
        return job, run(job, hands, {liar: changed(hands[liar], -1)} if liar else {})

    honest_job, _ = trained(0)
    job, banned = trained(1e-9, "third")
    assert [*banned] == ["third"] and job.digest() == honest_job.digest()


def send_all(hands: dict[str, Hand]) -> None:
    """A round's updates, of which the first hand's is turned."""
    for name, grant in [(name, hand.pull()) for name, hand in hands.items()]:
        if grant.micro_batches:
            hands[name].send(grant, changed(hands[name], -1) if name == "first" else lambda message: message)


def run_out(job: Job) -> int:
    """Have the time of the only suspicion run out; returns its unit."""
    disputes = job.store.keys.disputes()
    [(unit, about)] = job.redis.hgetall(disputes).items()
    job.redis.hset(disputes, unit, json.dumps(json.loads(about) | {"ends": 1}))
    return int(unit)


def copy_lease(job: Job, hand: Hand, unit: int) -> None:
    """Have a hand hold the lease on a copy of a unit."""
    now = int(job.store.redis.time()[0])  # type: ignore[index]
    lease = f"{hand.session.session_id}|{1000 * (now + 60)}|{1000 * now}|{hand.session.worker_id}"
    job.redis.hset(job.store.keys.audits(), str(unit), lease)


def skipped(job: Job, hands: dict[str, Hand]) -> None:
    """A round in which the first unit, which is turned, is suspected, and copied by a machine of another kind."""
    job.redis.hset(job.store.keys.kinds(), "sixth", "another kind")
    send_all(hands)
    idle = hands["sixth"].pull()
    copy_lease(job, hands["sixth"], 0)  # as from before anybody had the unit
    job.reducer.advance()
    assert hands["second"].pull().micro_batches == ()
    assert hands["sixth"].send(replace(idle, micro_batches=(0,))) == "accepted"
    job.reducer.advance()
    assert outcomes(job) == ["skipped"]
    assert job.store.read().version == 0  # type: ignore[union-attr]


def test_a_copy_by_a_machine_of_another_kind_does_not_end_a_suspicion(start: Callable[..., Job]) -> None:
    expected = honest(start)
    job, hands = local(start)
    skipped(job, hands)
    assert [*run(job, hands, {"first": changed(hands["first"], -1)})] == ["first"]
    assert job.digest() == expected


def test_a_suspected_update_that_the_broker_lost_is_computed_anew_at_once(start: Callable[..., Job]) -> None:
    expected = honest(start)
    job, hands = local(start)
    send_all(hands)
    job.reducer.advance()
    grant = hands["sixth"].pull()
    assert grant.micro_batches == (0,) and hands["sixth"].send(grant) == "accepted"
    assert job.redis.delete(job.store.keys.update(grant.token, 0))
    job.reducer.advance()
    assert [one["reason"] for one in events(job.store, "refused")] == ["the broker has lost the blob"]
    assert not job.redis.exists(job.store.keys.disputes())
    assert run(job, hands, {}) == {}
    assert job.digest() == expected


def counts_after_all(job: Job, outcome: str) -> None:
    """The suspected update counts, for this reason."""
    job.reducer.advance()
    assert job.store.read().version == 1  # type: ignore[union-attr]
    assert [one["outcome"] for one in events(job.store, "suspected")] == ["asked", outcome]


def test_a_suspected_update_that_only_another_kind_copied_counts_in_time(start: Callable[..., Job]) -> None:
    job, hands = local(start)
    skipped(job, hands)
    assert run_out(job) == 0
    counts_after_all(job, "late")


def test_a_suspected_update_counts_if_nobody_computes_it_again_in_time(start: Callable[..., Job]) -> None:
    job, hands = local(start)
    send_all(hands)
    for _ in range(3):
        job.reducer.advance()
    assert job.store.read().version == 0  # type: ignore[union-attr]
    run_out(job)
    counts_after_all(job, "late")


def test_a_suspected_update_counts_at_once_if_nobody_is_left_to_compute_it_again(start: Callable[..., Job]) -> None:
    job, hands = local(start)
    send_all(hands)
    job.reducer.advance()
    assert job.store.read().version == 0  # type: ignore[union-attr]
    for name in hands.keys() - {"first"}:
        hands[name].session.leave("gone")
    counts_after_all(job, "alone")


def test_a_suspicion_waits_while_the_job_is_paused(start: Callable[..., Job]) -> None:
    job, hands = local(start)
    send_all(hands)
    job.reducer.advance()
    assert job.store.pause()
    unit = run_out(job)
    job.reducer.advance()
    state = job.store.read()
    assert state and (state.status, state.version) == ("paused", 0)
    assert json.loads(job.redis.hget(job.store.keys.disputes(), str(unit)) or b"")["ends"] > 1


def test_a_third_machine_that_confirms_nobody_makes_no_more_than_its_share(start: Callable[..., Job]) -> None:
    job, hands = local(start, "huber")
    spoiled = {name: changed(hands[name], factor) for name, factor in (("first", -1), ("second", -2), ("third", -3))}
    for name, grant in [(name, hand.pull()) for name, hand in hands.items()]:
        if grant.micro_batches:
            hands[name].send(grant, spoiled["first"] if name == "first" else lambda message: message)
    job.reducer.advance()
    for name in ("second", "third"):  # who computes it again lies as well
        grant = hands[name].pull()
        assert grant.micro_batches == (0,) and hands[name].send(grant, spoiled[name]) == "accepted"
        job.reducer.advance()
    assert outcomes(job) == ["undecided"] and events(job.store, "banned") == []
    assert [one["reason"] for one in events(job.store, "refused")] == [
        "audit: undecided, and beyond its machine's share"
    ]
    assert hands["first"].pull().micro_batches == (0,)
    assert not job.redis.exists(job.store.keys.strikes())


# With a delay


def delayed(start: Callable[..., Job], audit: float) -> tuple[Job, dict[str, Worker]]:
    """As `local`, with a delay."""
    fields: dict[str, Any] = {"strategy": {**LOCAL, "delay": 1}, "micro_batch": 6, "rounds": 6}
    job = start(**fields, optimizer=None, audit=audit, workers={"min": 1, "max": 6})
    return job, {name: Worker(job.hand(name)) for name in HANDS}


def run_delayed(job: Job, workers: dict[str, Worker], liar: str = "") -> list[str]:
    """Until the job is done: each worker in turn leases and submits. Returns the banned ones."""
    banned: list[str] = []
    while (state := job.store.read()) and state.status == "running":
        for name in [one for one in workers if one not in banned]:
            hand = workers[name].hand
            try:
                workers[name].turn(changed(hand, -1) if name == liar else lambda message: message)
            except Banned:
                banned.append(name)
        job.reducer.advance()
    job.reducer.close()
    return banned


@pytest.mark.parametrize("liar", ["first", "fourth"])
def test_with_a_delay_too_a_suspected_lie_is_replaced_before_the_version_is_made(
    start: Callable[..., Job], liar: str
) -> None:
    plain, workers = delayed(start, 0)
    assert run_delayed(plain, workers) == []
    job, workers = delayed(start, 1e-9)
    assert run_delayed(job, workers, liar) == [liar]
    assert job.digest() == plain.digest()
    assert {*outcomes(job)} <= {"mismatched", "confirmed"} and "mismatched" in outcomes(job)
    assert not job.redis.exists(job.store.keys.disputes(), job.store.keys.copies(), job.store.keys.audits())


def test_what_a_liar_sent_for_the_next_round_counts_no_more_than_what_it_sent_for_this(
    start: Callable[..., Job],
) -> None:
    fields: dict[str, Any] = {"strategy": {"kind": "sync", "delay": 1}, "micro_batches_per_round": 4}
    plain = start(**fields)
    assert run_delayed(plain, {"solo": Worker(plain.hand("solo"))}) == []
    job = start(**fields, audit=1e-9, workers={"min": 1, "max": 3})
    workers = {name: Worker(job.hand(name)) for name in HANDS[:3]}
    liar, copier = workers["first"], workers["second"]
    keys = job.store.keys
    assert liar.turn(changed(liar.hand, -1))
    while job.redis.hlen(keys.received()) < 4:
        assert copier.turn()
    unit, *_ = (int(one) for one, entry in job.redis.hgetall(keys.received()).items() if b'"first"' in entry)
    assert liar.turn(changed(liar.hand, -1))
    assert all(b'"first"' in entry for entry in job.redis.hvals(keys.early()))
    copy_lease(job, copier.hand, unit)
    grant = Grant("leased", copier.loaded, 0, (unit,))
    assert copier.hand.send(grant) == "accepted"
    assert run_delayed(job, workers) == ["first"]
    assert job.digest() == plain.digest()
    assert outcomes(job) == ["mismatched"]
