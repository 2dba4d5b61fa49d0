"""Versions that are made and published bucket by bucket while their rounds are open: the same bits, committed once."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from redis.exceptions import OutOfMemoryError

from computeshare.codecs.messages import add_delta, decode_weights, encode_update, weights_parts, weights_room
from computeshare.codecs.registry import CODECS, EXACT
from computeshare.errors import LostClaim
from computeshare.protocol.reducer_session import ReducerSession
from computeshare.protocol.worker_session import Draft, WorkerSession
from computeshare.reducer.drafts import round_draft
from computeshare.tensors import layout
from computeshare.worker.seat.drafts.draft_reader import DraftReader
from computeshare.worker.seat.weights_receiver import WeightsReceiver
from tests.support.drafts import Follower, Sending, follow, leased
from tests.support.job_reducer import ADAM, Job, Worker, spec_of
from tests.support.rounds import events
from tests.support.wait import wait_until

MOMENTUM = {"name": "SGD", "lr": 0.05, "momentum": 0.9}
JOBS: dict[str, dict[str, Any]] = {
    "float32": {"codec": {"up": "float16", "down": "float32"}, "optimizer": MOMENTUM},
    "float16": {"codec": {"up": "float16", "down": "float16"}, "optimizer": ADAM},
    "int8": {"codec": {"up": "int8", "down": "int8"}, "optimizer": MOMENTUM, "schedule": {"name": "cosine"}},
    "lowrank": {"codec": {"up": "float16", "down": "lowrank2"}, "optimizer": {"name": "NAdam", "lr": 0.01}},
    "average": {"codec": {"up": "float16", "down": "int8"}, "ema": 0.5, "decay": "matrices"},
    "local": {
        "strategy": {"kind": "local", "inner_steps": 2, "replicas": 4},
        "codec": {"up": "int8", "down": "int8"},
        "optimizer": None,
    },
    "buffers": {"model": "resnet20", "codec": {"up": "int8", "down": "int8"}, "optimizer": MOMENTUM},
    "median": {"strategy": {"kind": "sync", "combine": "median"}, "optimizer": MOMENTUM},
}


@pytest.fixture(autouse=True)
def several_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models have buckets of 5,000 values: four for the 17,226 of this one."""
    monkeypatch.setattr(layout, "BUCKET", 5000)


def draft_of(job: Job) -> str:
    """The name of the draft that the current version was; empty: it was none."""
    name = job.redis.hget(job.store.keys.round(), "draft")
    return bytes(name or b"").decode()


def drafted(job: Job) -> list[tuple[str, int]]:
    """Names and parts that were told, oldest first."""
    entries = job.redis.xrange(job.store.keys.drafts())
    return [(fields[b"name"].decode(), int(fields[b"part"])) for _, fields in entries]


def send_early(job: Job, hands: list[Follower]) -> None:
    """A round in which each part is made as soon as all have offered it: the buffers first, then the last bucket."""
    sendings, buckets = leased(*hands), len(hands[0].layout.buckets)
    for part in reversed(range(buckets + 1)):
        for sending in sendings:
            sending.offer(part)
        job.reducer.advance()
        assert drafted(job)[-1][1] == (part if part < buckets else buckets + 1)  # counters come with the buffers
    name = drafted(job)[-1][0]
    parts = job.redis.hgetall(job.store.keys.draft(name))
    assert len(parts) == buckets + 2
    assert [sending.submit() for sending in sendings] == ["accepted"] * len(sendings)
    job.reducer.advance()
    state = job.store.read()
    assert state is not None and draft_of(job) == name
    keys = job.store.keys
    committed = job.redis.hgetall(keys.delta(str(state.token))) or job.redis.hgetall(keys.weights(str(state.token)))
    assert parts.items() <= committed.items()


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.slow
def test_a_version_is_the_same_bits_whether_it_was_drafted_or_not(name: str, start: Callable[..., Job]) -> None:
    whole, early = start(**JOBS[name]), start(**JOBS[name])
    hands, plain = [follow(early, "a"), follow(early, "b")], follow(whole, "solo")
    for _ in range(4):
        assert {sending.submit() for sending in leased(plain)} == {"accepted"}
        whole.reducer.advance()
        send_early(early, hands)
        assert early.digest() == whole.digest()
    assert early.finish(*hands) == whole.finish(plain)


@pytest.mark.parametrize(
    "fields",
    [
        {"clip_norm": 1.0},
        {"strategy": {"kind": "sync", "max_norm": 1.0}},
        {"strategy": {"kind": "sync", "quorum": 0.5}},
        {"strategy": {"kind": "async"}},
        {"optimizer": {"name": "Adafactor", "lr": 0.01}},
    ],
)
def test_what_depends_on_the_whole_round_is_not_drafted(fields: dict[str, Any]) -> None:
    spec = spec_of(**fields)
    assert not spec.has_drafts and spec_of().has_drafts


@pytest.mark.parametrize("kind", ["sync", "local"])
def test_with_a_delay_a_round_is_drafted_of_what_was_offered_before_it_began(
    kind: str, start: Callable[..., Job]
) -> None:
    """Each update is offered as a whole while the round before is open, and submitted once that is over."""
    fields = JOBS["int8" if kind == "sync" else "local"]
    fields = {**fields, "strategy": {**fields.get("strategy", {"kind": "sync"}), "delay": 1}}
    whole, early = start(**fields), start(**fields)
    expected, hand = Worker(follow(whole, "solo")).finish(whole), follow(early, "a")
    parts = range(len(hand.layout.buckets) + 1)
    waiting, made = list[Sending](), 0
    while (state := early.store.read()) and state.status == "running":
        while (grant := hand.session.lease("")).answer == "leased":
            weights = hand.inbox.fetch(hand.session, grant.token)
            assert weights is not None
            hand.replica.load(weights)
            waiting.append(Sending(hand, grant))
            waiting[-1].offer(*parts)
        early.reducer.advance()
        told = [name for token, name, _ in hand.session.drafted(1) if token == str(state.token)]
        assert len(told) == len(hand.layout.buckets) + 2, "all of it, before anything is submitted"
        for sending in [one for one in waiting if min(one.messages) in state.units]:
            waiting.remove(sending)
            assert sending.submit() == "accepted"
        early.reducer.advance()
        made += draft_of(early) == told[0]
    early.reducer.close()
    assert early.digest() == expected and made == early.spec.rounds_total
    ages = [[event.get("staleness") for event in events(job.store, "version")] for job in (whole, early)]
    assert ages[0] == ages[1] and any(ages[1]), "the ledger says on which versions they were computed"


def test_an_update_that_takes_the_place_of_a_dead_workers_begins_another_draft(start: Callable[..., Job]) -> None:
    job = start()
    hand, lost = follow(job, "a"), follow(job, "b")
    mine, its = leased(hand, lost)
    mine.offer(3)
    its.offer(3)
    job.reducer.advance()
    first = drafted(job)[-1][0]
    lost.session.leave("gone")
    again = Sending(hand, hand.session.lease(mine.token))
    again.offer(3)
    job.reducer.advance()
    assert drafted(job)[-1][0] != first and not job.redis.exists(job.store.keys.draft(first))
    again.submit()
    mine.submit()
    job.reducer.advance()
    assert draft_of(job) == drafted(job)[-1][0]


def test_a_bucket_is_made_once_every_update_of_the_round_has_it(start: Callable[..., Job]) -> None:
    job = start()
    first, second = leased(follow(job, "a"), follow(job, "b"))
    first.offer(3, 2)
    job.reducer.advance()
    assert drafted(job) == []
    second.offer(2)
    job.reducer.advance()
    assert [part for _, part in drafted(job)] == [2]
    assert second.submit() == "accepted"  # all of it is there now
    job.reducer.advance()
    assert [part for _, part in drafted(job)] == [2, 3]
    assert first.submit() == "accepted"
    job.reducer.advance()
    assert [part for _, part in drafted(job)] == [2, 3, 4, 5, 0, 1] and draft_of(job) == drafted(job)[0][0]


def test_what_was_drafted_of_other_updates_does_not_count(start: Callable[..., Job]) -> None:
    """A worker dies after it has sent half of its update; another computes the units again."""
    whole, job = start(), start()
    plain, hand, lost = follow(whole, "solo"), follow(job, "a"), follow(job, "b")
    mine, its = leased(hand, lost)
    its.messages = {m: [parts[0], parts[1], parts[0], *parts[3:]] for m, parts in its.messages.items()}
    mine.offer(3, 2)
    its.offer(3, 2)
    job.reducer.advance()
    name = drafted(job)[-1][0]
    assert mine.submit() == "accepted"
    lost.session.leave("gone")
    grant = hand.session.lease(mine.token)
    assert sorted(grant.micro_batches) == sorted(its.messages)
    again = Sending(hand, grant)
    assert again.submit() == "accepted"
    job.reducer.advance()
    whole.round(plain)
    assert job.digest() == whole.digest() and draft_of(job) == ""
    assert not job.redis.exists(job.store.keys.draft(name))


@pytest.mark.parametrize("part", [2, -1], ids=["bucket", "buffers"])
def test_a_part_that_was_changed_after_it_was_drafted_is_read_again(part: int, start: Callable[..., Job]) -> None:
    """A sender may write what it has staged until it submits it: what counts is what was accepted."""
    fields = JOBS["buffers"] if part < 0 else {}
    whole, job = start(**fields), start(**fields)
    plain, hand = follow(whole, "solo"), follow(job, "a")
    straight = Sending(plain, plain.pull())
    bent = Sending(hand, hand.pull())
    changed = part % (len(hand.layout.buckets) + 1)
    other = {m: parts[changed] for m, parts in bent.messages.items()}
    zeros = encode_update(
        hand.up, np.zeros(hand.layout.parameters, np.float32), np.zeros(hand.layout.buffers, np.float32), hand.layout, 0
    )[changed]
    for m, parts in bent.messages.items():
        parts[changed] = straight.messages[m][changed] = zeros
        assert bytes(other[m]) != bytes(zeros)
        bent.session.stage(bent.nonce, m, {changed: other[m]}, bent.token)
    bent.staged |= {(m, changed) for m in other}
    job.reducer.advance()
    assert drafted(job)[0][1] == changed
    bent.offer(changed)  # the same number, other bytes
    assert (bent.submit(), straight.submit()) == ("accepted", "accepted")
    for one in (job, whole):
        one.reducer.advance()
        one.reducer.advance()
    state = job.store.read()
    assert state is not None and state.version == 1
    assert job.digest() == whole.digest() and draft_of(job) == ""


@pytest.mark.parametrize("damage", ["no frame", "infinite"])
def test_a_damaged_part_is_refused_once_it_is_submitted_and_not_before(damage: str, start: Callable[..., Job]) -> None:
    job = start(codec={"up": "float32", "down": "float32"}, strategy={"kind": "sync", "combine": "median"})
    hand = follow(job, "a")
    sending = Sending(hand, hand.pull())
    buffers, infinite = np.zeros(hand.layout.buffers, np.float32), np.full(hand.layout.parameters, np.inf, np.float32)
    message = encode_update(hand.up, infinite, buffers, hand.layout, 0)
    parts = next(iter(sending.messages.values()))
    parts[1] = message[1] if damage == "infinite" else b"no frame"
    sending.offer(3, 2, 1)
    job.reducer.advance()
    assert [part for _, part in drafted(job)] == [3, 2]
    assert job.redis.hlen(job.store.keys.strikes()) == 0
    assert sending.submit() == "accepted"
    job.reducer.advance()
    job.reducer.advance()
    state = job.store.read()
    assert state is not None and state.version == 0
    assert job.redis.hlen(job.store.keys.received()) == len(sending.messages) - 1
    assert job.redis.hget(job.store.keys.strikes(), "a") == (b"1" if damage == "no frame" else None)
    job.round(hand)
    assert job.store.read().version == 1  # type: ignore[union-attr]


def test_workers_do_not_use_a_draft_of_a_reducer_that_was_followed_by_another(start: Callable[..., Job]) -> None:
    """It drafts other updates than its successor combines; both drafts have the same parts of the same version."""
    whole, job = start(**JOBS["int8"]), start(**JOBS["int8"])
    plain, hand, lost = follow(whole, "solo"), follow(job, "a"), follow(job, "b")
    whole.round(plain)
    mine, its = leased(hand, lost)
    its.messages = {m: [parts[0], parts[1], parts[0], *parts[3:]] for m, parts in its.messages.items()}
    for sending in (mine, its):
        sending.offer(3, 2)
    job.reducer.advance()
    read = early_parts(job, hand, mine.token)
    assert sorted(read.parts) == [2, 3]
    job.reducer = job.new_reducer()
    lost.session.leave("gone")
    assert mine.submit() == "accepted"
    grant = hand.session.lease(mine.token)
    again = Sending(hand, grant)
    again.offer(3, 2, 1, 0)
    job.reducer.advance()  # takes over
    job.reducer.advance()
    second = early_parts(job, hand, mine.token)
    assert second.name != read.name
    assert again.submit() == "accepted"
    job.reducer.advance()
    assert job.digest() == whole.digest() and draft_of(job) == second.name
    for draft in (read, second):
        assert digest_with(job, hand, draft) == whole.digest()


def early_parts(job: Job, hand: Follower, token: str) -> Draft:
    """What a worker reads of the newest draft of the version after `token`."""
    told = [(name, part) for at, name, part in hand.session.drafted(1) if at == token]
    name = told[-1][0]
    parts = [part for one, part in told if one == name]
    room = weights_room(hand.layout)
    found = hand.session.read_draft(name, parts, [room[part] for part in parts])
    return Draft(token, name, {part: bytes(blob) for part, blob in zip(parts, found, strict=True) if blob})


def digest_with(job: Job, hand: Follower, draft: Draft) -> str:
    """The digest of the current version as a worker has it that has read `draft` before."""
    state = job.store.read()
    assert state is not None
    before = hand.session.read_weights(str(state.base), weights_parts(hand.layout))
    assert before is not None
    pulled, _ = hand.session.follow(
        str(state.base), str(state.token), weights_parts(hand.layout), weights_room(hand.layout), draft
    )
    assert pulled is not None and pulled.whole is None
    weights = decode_weights(EXACT, before, hand.layout)
    for delta in pulled.deltas:
        weights = add_delta(CODECS["int8"], delta, hand.layout, weights)
    return hand.layout.digest(weights)[:16]


def test_a_worker_reads_only_the_parts_that_its_draft_lacks(start: Callable[..., Job]) -> None:
    job = start(**JOBS["float32"])
    hand = follow(job, "a")
    sending = Sending(hand, hand.pull())
    sending.offer(3, 2)
    job.reducer.advance()
    draft = early_parts(job, hand, sending.token)
    sending.submit()
    job.reducer.advance()
    token = str(job.store.read().token)  # type: ignore[union-attr]
    job.redis.hdel(job.store.keys.weights(token), "2", "3")
    room, count = weights_room(hand.layout), weights_parts(hand.layout)
    message, grant = hand.session.pull(token, count, room, draft)
    assert message is not None and grant.micro_batches
    assert hand.layout.digest(decode_weights(hand.down, message, hand.layout))[:16] == job.digest()
    assert hand.session.pull(token, count, room, Draft("", "0" * 32, draft.parts))[0] is None


@pytest.mark.parametrize("given_up", [False, True])
def test_bytes_of_drafts_are_counted_once_and_also_where_they_are_given_up(
    start: Callable[..., Job], given_up: bool
) -> None:
    job = start(**JOBS["float32"])
    hand = follow(job, "a")
    own = WorkerSession(job.redis, job.job_id, "a", hand.session.session_id)
    with DraftReader(own) as drafts:
        inbox = WeightsReceiver(hand.session, "float32", hand.layout, drafts=drafts)
        sending = Sending(hand, hand.pull())
        inbox.look_out(sending.token)
        sending.offer(3, 2)
        job.reducer.advance()
        wait_until(lambda: drafts._parts.keys() == {2, 3}, 5)
        drafted = sum(map(len, drafts._parts.values()))
        if given_up:  # another submission counts
            sending.nonce, sending.staged = "another", set()
        assert sending.submit() == "accepted"
        job.reducer.advance()
        token = str(job.store.read().token)  # type: ignore[union-attr]
        weights, _ = inbox.pull(token)
    whole = sum(map(len, job.redis.hvals(job.store.keys.weights(token))))
    assert weights is not None and inbox.is_right() and bool(draft_of(job)) != given_up
    assert inbox.bytes == whole + given_up * drafted


def test_a_late_reducer_publishes_no_parts(start: Callable[..., Job]) -> None:
    job = start()
    hand = follow(job, "a")
    sending = Sending(hand, hand.pull())
    late = job.reducer
    job.reducer = job.new_reducer()
    sending.offer(3)
    with pytest.raises(LostClaim):
        late.advance()
    assert drafted(job) == []


def test_a_draft_that_the_broker_has_lost_is_not_committed(start: Callable[..., Job]) -> None:
    whole, job = start(), start()
    plain, hand = follow(whole, "solo"), follow(job, "a")
    whole.round(plain)
    sending = Sending(hand, hand.pull())
    sending.offer(3, 2)
    job.reducer.advance()
    job.redis.delete(job.store.keys.draft(drafted(job)[0][0]))
    sending.submit()
    with pytest.raises(LostClaim):
        job.reducer.advance()
    state = job.store.read()
    assert state is not None and state.version == 0
    job.reducer = job.new_reducer()
    job.reducer.advance()
    assert job.digest() == whole.digest()


def test_a_draft_is_kept_from_expiring_while_its_round_is_open(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start()
    hand = follow(job, "a")
    sending = Sending(hand, hand.pull())
    sending.offer(3)
    job.reducer.advance()
    key = job.store.keys.draft(drafted(job)[0][0])
    assert 0 < job.redis.ttl(key) <= 120  # type: ignore[operator]
    job.redis.expire(key, 5)
    job.reducer.advance()
    assert job.redis.ttl(key) <= 5  # type: ignore[operator]
    monkeypatch.setattr(round_draft, "KEPT_S", -1.0)
    job.reducer.advance()
    assert job.redis.ttl(key) > 100  # type: ignore[operator]


def test_a_pause_drops_the_draft_and_the_bits_stay(start: Callable[..., Job]) -> None:
    whole, job = start(), start()
    plain, hand = follow(whole, "solo"), follow(job, "a")
    sending = Sending(hand, hand.pull())
    sending.offer(3, 2)
    job.reducer.advance()
    key = job.store.keys.draft(drafted(job)[0][0])
    assert job.redis.exists(key) and job.store.pause()
    job.reducer.advance()
    assert not job.redis.exists(key) and job.store.resume()
    assert sending.submit() == "accepted"
    job.reducer.advance()
    whole.round(plain)
    assert job.digest() == whole.digest()


def test_an_offer_needs_a_lease_and_wakes_the_reducer_once_it_completes_a_bucket(start: Callable[..., Job]) -> None:
    job = start()
    first, second = leased(follow(job, "a"), follow(job, "b"))
    keys = job.store.keys
    for unit in first.messages:
        second.session.stage(second.nonce, unit, {3: b"part"}, second.token)
    assert not job.redis.exists(keys.offers())
    first.offer(3)
    second.offer(2)
    assert not job.redis.exists(keys.full())
    second.offer(3)
    assert job.redis.lrange(keys.full(), 0, -1) == [first.token.encode()]
    entry = job.redis.hget(keys.offers(), str(next(iter(second.messages))))
    assert entry == f"b|{second.nonce}|,2,3,".encode()
    first.submit()
    assert sorted(job.redis.hkeys(keys.offers())) == sorted(str(m).encode() for m in second.messages)
    second.submit()
    job.reducer.advance()
    assert not job.redis.exists(keys.offers())


def test_a_broker_without_room_for_a_draft_commits_the_round_without_one(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start()
    hand = follow(job, "a")
    sending = Sending(hand, hand.pull())

    def without_room(*_: object) -> bool:
        raise OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(ReducerSession, "draft", without_room)
        sending.offer(3)
        job.reducer.advance()
    sending.offer(2)
    job.reducer.advance()
    assert drafted(job) == [], "no other is tried in this round"
    assert sending.submit() == "accepted"
    job.reducer.advance()
    state = job.store.read()
    assert state is not None and state.version == 1 and draft_of(job) == ""
    send_early(job, [hand])
