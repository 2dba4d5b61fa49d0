"""A reducer's job on a real broker: the same bits whoever computes, whoever dies, wherever it starts again."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis import Redis

from bench.support import plain
from computeshare.checkpoints.store import Artifacts, CheckpointManifest
from computeshare.codecs.messages import encode_update
from computeshare.errors import ArtifactError, Banned, Diverged, LostClaim
from computeshare.protocol import channel, reducer_session
from computeshare.protocol.reducer_session import ReducerSession
from computeshare.protocol.worker_session import Grant
from computeshare.reducer import gather, round_handler
from computeshare.reducer.round_handler import RoundHandler
from computeshare.strategies import averages
from computeshare.tensors import layout
from computeshare.types import Token
from tests.support.job_reducer import Hand, Job, Spoil, forked
from tests.support.rounds import take_seat
from tests.support.wait import wait_until


def first(change: Callable[[bytes], bytes]) -> Spoil:
    """Changes a message's first part."""
    return lambda message: [change(bytes(message[0])), *message[1:]]


@pytest.fixture
def several_buckets(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From the call on models have buckets of 5,000 values: four for the 17,226 of this one."""
    monkeypatch.setattr(averages, "bucket_values", lambda _: 5000)
    return lambda: monkeypatch.setattr(layout, "BUCKET", 5000)


def test_the_weights_do_not_depend_on_how_many_workers_there_are_or_who_they_are(start: Callable[..., Job]) -> None:
    alone, many = start(), start()
    one = alone.finish(alone.hand("solo"))
    hands = [many.hand(name) for name in "abc"]
    for turn in range(3):
        many.round(*hands[turn:], *hands[:turn])
    assert many.finish(hands[0]) == one


def test_the_weights_are_those_of_a_plain_loop(start: Callable[..., Job]) -> None:
    job = start(codec={"up": "float32"}, optimizer={"name": "SGD", "lr": 0.05, "momentum": 0.9}, rounds=40)
    hand = job.hand("solo")
    job.finish(hand)
    artifacts = Artifacts(job.root, job.job_id)
    token = artifacts.tokens()[-1]
    assert token.version == 40
    ours = hand.layout.gather(artifacts.tensors(token)).parameters
    assert np.abs(ours - plain.train(job.spec, Path()).parameters).max() < 1e-5


def dies_before_the_state(patch: pytest.MonkeyPatch) -> None:
    """Have reducers commit, and keep no state."""
    patch.setattr(round_handler, "armed", lambda _: True)  # else it goes with the commit
    patch.setattr(ReducerSession, "store_state", lambda *_: None)


def test_one_who_takes_over_between_commit_and_state_recomputes_the_same_bits(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = start(), start()
    expected = whole.finish(whole.hand("solo"))
    hand = broken.hand("solo")
    broken.round(hand)
    with monkeypatch.context() as patch:
        dies_before_the_state(patch)
        broken.round(hand)
    state = broken.store.read()
    assert state is not None and not broken.redis.exists(broken.store.keys.state(str(state.token)))
    broken.reducer = broken.new_reducer()
    assert broken.reducer.advance()
    assert broken.finish(hand) == expected


def test_one_who_takes_over_a_full_round_commits_it_once(start: Callable[..., Job]) -> None:
    whole, job = start(), start()
    expected = whole.finish(whole.hand("solo"))
    hand = job.hand("solo")
    grant = hand.pull()
    hand.send(grant)
    late = job.reducer
    job.reducer = job.new_reducer()
    assert job.reducer.advance()
    state = job.store.read()
    assert state is not None and state.version == 1
    with pytest.raises(LostClaim):
        late.advance()
    assert job.finish(hand) == expected


def test_a_late_reducer_that_computed_the_same_round_commits_nothing(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start()
    hand = job.hand("solo")
    hand.send(hand.pull())
    late, claim_commit = job.reducer, ReducerSession.commit

    def slow_commit(self: ReducerSession, *arguments: Any) -> bool:
        monkeypatch.setattr(ReducerSession, "commit", claim_commit)
        job.reducer = job.new_reducer()  # meanwhile another takes over and is quicker
        assert job.reducer.advance()
        return claim_commit(self, *arguments)

    monkeypatch.setattr(ReducerSession, "commit", slow_commit)
    with pytest.raises(LostClaim, match="reduced by another"):
        late.advance()
    state = job.store.read()
    assert state is not None and state.version == 1


def last_manifest(job: Job) -> CheckpointManifest:
    artifacts = Artifacts(job.root, job.job_id)
    return artifacts.manifest(artifacts.tokens()[-1])


def test_the_moving_average_is_the_same_whoever_takes_over_and_whatever_the_broker_loses(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken, without = start(ema=0.5), start(ema=0.5), start(rounds=1)
    for job in (whole, without):
        job.finish(job.hand("solo"))
    hand = broken.hand("solo")
    for turn in range(5):  # five reducers die, every other one between commit and state
        with monkeypatch.context() as patch:
            if turn % 2:
                dies_before_the_state(patch)
            broken.round(hand)
        broken.reducer = broken.new_reducer()
        assert broken.reducer.advance()
    broken.reducer.close()
    broken.store.purge()
    broken.store.publish(broken.spec.model_dump_json())
    broken.reducer = broken.new_reducer()
    assert broken.reducer.advance()
    broken.finish(broken.hand("a"), broken.hand("b"))
    expected, found = last_manifest(whole), last_manifest(broken)
    assert (found.version, found.sha256, found.average) == (6, expected.sha256, expected.average)
    assert expected.average not in ("", expected.sha256) and not last_manifest(without).average


def test_an_emptied_broker_is_restored_from_the_last_checkpoint_to_the_same_weights(start: Callable[..., Job]) -> None:
    whole, emptied = start(), start()
    expected = whole.finish(whole.hand("solo"))
    hand = emptied.hand("solo")
    for _ in range(5):
        emptied.round(hand)
    emptied.reducer.close()
    emptied.store.purge()
    emptied.store.publish(emptied.spec.model_dump_json())
    emptied.reducer = emptied.new_reducer()
    assert emptied.reducer.advance()
    state = emptied.store.read()
    assert state is not None and (state.token.incarnation, state.version) == (2, 3)
    assert emptied.finish(emptied.hand("another")) == expected


def test_a_checkpoint_is_not_written_once_the_broker_lost_what_led_to_it(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ledger would have a gap, and be restored with it."""
    job = start()
    hand, writes = job.hand("solo"), list[Callable[[], None]]()
    monkeypatch.setattr(job.reducer.checkpoints._disk, "submit", writes.append)
    for _ in range(3):
        job.round(hand)
    job.store.purge()
    job.store.publish(job.spec.model_dump_json())
    with pytest.raises(LostClaim, match="lost what led to version"):
        writes[0]()
    assert Artifacts(job.root, job.job_id).tokens() == []


HALF = {"up": "float16", "down": "float16"}
"""Then the reducer keeps full-precision parameters beside what it publishes."""
MOMENTUM = {"name": "SGD", "lr": 0.05, "momentum": 0.9}


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def told(job: Job, kind: str) -> list[dict[str, Any]]:
    entries: Any = job.redis.xrange(job.store.keys.events())
    return [json.loads(fields[b"data"]) for _, fields in entries if fields[b"type"].decode() == kind]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("weights.safetensors", -5),
        ("state.safetensors", 1003),  # the highest byte of a full-precision parameter
        ("state.safetensors", -5),  # momentum
        ("manifest.json", -40),
        ("manifest.json", '"next_micro_batch": 1'),
    ],
    ids=["weights", "parameters", "momentum", "its digest", "a number"],
)
def test_a_checkpoint_with_one_wrong_bit_is_passed_over_for_the_one_before(
    start: Callable[..., Job], name: str, place: int | str
) -> None:
    changes: dict[str, Any] = {"checkpoint_every": 2, "codec": HALF, "optimizer": MOMENTUM}
    whole, job = start(**changes), start(**changes)
    expected = whole.finish(whole.hand("solo"))
    hand = job.hand("solo")
    for _ in range(4):
        job.round(hand)
    job.reducer.close()
    artifacts = Artifacts(job.root, job.job_id)
    damaged = artifacts.tokens()[-1]
    path = artifacts.path(damaged, name)
    content = path.read_bytes()
    at = place if isinstance(place, int) else content.index(place.encode()) + len(place) - 1
    path.write_bytes(flipped(content, at % len(content)))
    job.store.purge()
    job.store.publish(job.spec.model_dump_json())
    job.reducer = job.new_reducer()
    assert job.reducer.advance()
    state = job.store.read()
    assert state is not None and state.version == 2
    assert [(event["token"], event["version"]) for event in told(job, "damaged")] == [(str(damaged), 4)]
    assert job.finish(job.hand("another")) == expected


@pytest.mark.parametrize("place", [1003, -5], ids=["parameters", "momentum"])
def test_a_state_in_the_broker_with_one_wrong_bit_is_not_gone_on_from(start: Callable[..., Job], place: int) -> None:
    changes: dict[str, Any] = {"codec": HALF, "optimizer": MOMENTUM}
    whole, job = start(**changes), start(**changes)
    expected = whole.finish(whole.hand("solo"))
    hand = job.hand("solo")
    for _ in range(4):
        job.round(hand)
    job.reducer.close()
    state = job.store.read()
    assert state is not None
    key = job.store.keys.state(str(state.token))
    parts: Any = job.redis.hgetall(key)
    field, content = max(parts.items(), key=lambda part: len(part[1]))
    job.redis.hset(key, field, flipped(content, place % len(content)))
    job.reducer = job.new_reducer()
    assert job.reducer.advance()
    state = job.store.read()
    assert state is not None and (state.token.incarnation, state.version) == (2, 3)
    assert "checksum mismatch" in told(job, "mended")[0]["error"]
    assert job.finish(job.hand("another")) == expected


def test_what_a_lost_incarnation_computed_is_stale(start: Callable[..., Job]) -> None:
    job = start()
    hand = job.hand("solo")
    grant = hand.pull()
    job.store.purge()
    job.store.publish(job.spec.model_dump_json())
    job.reducer = job.new_reducer()
    assert job.reducer.advance()
    take_seat(hand.session)
    assert hand.send(grant) == "stale"  # the same version and digest, another incarnation


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (first(lambda part: b"x"), "truncated"),
        (first(lambda part: b"garbage" * 100), "wrong length|header|truncated"),
        (first(lambda part: part[:-5]), "truncated"),
        (first(lambda part: part[:30] + bytes([part[30] ^ 1]) + part[31:]), "checksum"),
        (first(lambda part: part + b"more"), "wrong length|checksum"),
        (lambda message: message[:1], "truncated: part 1 of 2 is missing"),
    ],
)
def test_garbage_is_refused_with_its_reason_and_the_job_goes_on(
    start: Callable[..., Job], spoil: Spoil, reason: str
) -> None:
    whole, job = start(), start()
    expected = whole.finish(whole.hand("solo"))
    liar, honest = job.hand("liar"), job.hand("honest")
    grants = liar.pull(), honest.pull()
    assert liar.send(grants[0], spoil) == "accepted"  # received; the reducer judges it
    assert honest.send(grants[1]) == "accepted"
    assert job.reducer.advance()
    refused = [f for _, f in job.redis.xrange(job.store.keys.events()) if f[b"type"] == b"refused"]  # type: ignore[union-attr]
    assert len(refused) == len(grants[0].micro_batches)
    assert re.search(reason, refused[0][b"data"].decode())
    assert job.redis.hget(job.store.keys.strikes(), "liar") == b"1"  # one submission
    while (state := job.store.read()) and state.version == 0:
        job.round(honest)
    assert job.finish(honest) == expected


def nan(hand: Hand) -> Spoil:
    vector = np.full(hand.layout.parameters, np.nan, np.float32)
    return lambda _: encode_update(hand.up, vector, np.zeros(0, np.float32), hand.layout, 0)


def test_one_workers_nan_is_refused_and_anothers_values_count(start: Callable[..., Job]) -> None:
    job = start()
    broken, honest = job.hand("broken"), job.hand("honest")
    grants = broken.pull(), honest.pull()
    broken.send(grants[0], nan(broken))
    honest.send(grants[1])
    assert job.reducer.advance()
    while (state := job.store.read()) and state.version == 0:
        job.round(honest)
    assert job.redis.hget(job.store.keys.strikes(), "broken") == b"1"


def test_nan_from_two_sessions_is_divergence_and_says_where(start: Callable[..., Job]) -> None:
    job = start()
    first = job.hand("first")
    first.send(first.pull(), nan(first))
    assert job.reducer.advance()
    first.session.leave("done")
    second = job.hand("second")
    second.send(second.pull(), nan(second))
    with pytest.raises(
        Diverged, match=r"Training diverged at version 0: micro-batch 0 produced NaN or infinity 2 times \(2 workers\)"
    ):
        job.reducer.advance()


def test_a_worker_that_sends_nan_again_and_again_is_banned_and_fails_no_job(start: Callable[..., Job]) -> None:
    job = start()
    expected = (calm := start()).finish(calm.hand("solo"))
    broken, honest = job.hand("broken"), job.hand("honest")
    banned = False
    while (state := job.store.read()) and state.status == "running":
        for hand in (broken, honest):
            try:
                grant = hand.pull()
            except Banned:
                banned = True
                continue
            if grant.micro_batches:
                hand.send(grant, nan(broken) if hand is broken else lambda message: message)
        job.reducer.advance()
    job.reducer.close()
    assert banned and job.digest() == expected


def test_more_workers_with_nan_than_the_job_bears_are_divergence(start: Callable[..., Job]) -> None:
    """Each of them may have a share that nobody else may take, so that no two can agree on one."""
    job = start(strategy={"kind": "sync", "combine": "median"}, workers={"min": 3}, micro_batches_per_round=3)
    hands = [job.hand(worker) for worker in "abc"]
    grants = [hand.pull() for hand in hands]
    for hand, grant in zip(hands, grants, strict=True):
        hand.send(grant, nan(hand))
    with pytest.raises(Diverged, match="diverged at version 0"):
        job.reducer.advance()


def test_the_reducer_itself_refuses_more_than_a_workers_share(start: Callable[..., Job], redis: Redis) -> None:
    """Somebody with the broker's password took the round's terms away while a worker leased and submitted."""
    job = start(strategy={"kind": "sync", "combine": "median"}, workers={"min": 3}, micro_batches_per_round=3)
    greedy = job.hand("greedy")
    terms: Any = redis.hmget(job.store.keys.round(), "sharers", "fewest")
    redis.hset(job.store.keys.round(), mapping={"sharers": 0, "fewest": 1})
    grant = greedy.pull()
    assert len(grant.micro_batches) == 3 and greedy.send(grant) == "accepted"
    redis.hset(job.store.keys.round(), mapping=dict(zip(("sharers", "fewest"), terms, strict=True)))
    job.reducer.advance()
    state, received = job.reducer.session.progress()
    assert state is not None and state.version == 0 and [*received] == [min(grant.micro_batches)]
    job.reducer.close()


def test_a_rate_that_makes_the_weights_explode_fails_as_divergence(start: Callable[..., Job]) -> None:
    job = start(optimizer={"name": "SGD", "lr": 1e8}, rounds=20)
    hand = job.hand("solo")
    with pytest.raises(Diverged, match="diverged at version"):
        for _ in range(20):
            job.round(hand)


def test_a_lossy_downlink_publishes_what_workers_hold_and_steps_on_full_precision(start: Callable[..., Job]) -> None:
    job = start(codec={"up": "float32", "down": "float16"})
    hand = job.hand("solo")
    job.round(hand)
    hand.pull()
    current = job.reducer.handler.current
    assert current is not None
    published = current.model.published.parameters
    assert np.array_equal(published, published.astype(np.float16).astype(np.float32))
    assert not np.array_equal(published, current.model.master)
    job.reducer = job.new_reducer()
    assert job.reducer.advance()
    assert job.reducer.handler.current is not None
    assert np.array_equal(job.reducer.handler.current.model.master, current.model.master)


# A quorum


def quorum_job(start: Callable[..., Job], **changes: Any) -> tuple[Job, Hand, Hand]:
    """A job that closes a round with half of it, two rounds of which are done; and a quick and a slow hand."""
    values = {"strategy": {"quorum": 0.5}, "micro_batches_per_round": 4, "checkpoint_every": 100}
    job = start(**values | {"rounds": 8, **changes})
    quick, slow = job.hand("quick"), job.hand("slow")
    for _ in range(2):  # eight arrivals make a deadline
        job.round(quick, slow)
    return job, quick, slow


def half_round(job: Job, quick: Hand, slow: Hand) -> tuple[Grant, Grant]:
    """Only the quick one sends what it leased; the deadline passes, and the round is reduced."""
    grants = slow.pull(), quick.pull()
    assert quick.send(grants[1]) == "accepted"
    job.redis.hincrby(job.store.keys.round(), "opened", -60_000)
    job.reducer.advance()
    return grants


def counted(job: Job) -> list[list[int]]:
    """What each version counted, by the events."""
    events: Any = job.redis.xrange(job.store.keys.events())
    versions = [json.loads(fields[b"data"]) for _, fields in events if fields[b"type"] == b"version"]
    return [[m for m, _, _ in version["counted"]] for version in versions]


def test_a_round_goes_on_without_what_is_late_and_an_epoch_still_counts_everything_once(
    start: Callable[..., Job],
) -> None:
    job, quick, slow = quorum_job(start, micro_batch=64, epochs=2, rounds=None)  # 23 micro-batches: six rounds
    late, sent = half_round(job, quick, slow)
    state = job.store.read()
    assert state is not None and (state.version, state.carried) == (3, late.micro_batches)
    assert slow.send(late) == "stale"
    while (state := job.store.read()) and state.status == "running":
        job.round(quick)
    job.reducer.close()
    lists = counted(job)
    assert len(lists) == 12 and sorted(m for numbers in lists for m in numbers) == list(range(46))
    assert lists[2] == list(sent.micro_batches) and set(late.micro_batches) < set(lists[3])


def test_before_its_deadline_a_round_waits_and_says_how_long(start: Callable[..., Job]) -> None:
    job, quick, slow = quorum_job(start)
    job.redis.lpush(job.store.keys.arrivals(), *[100_000] * 64)
    slow.pull()
    assert quick.send(quick.pull()) == "accepted"
    assert job.reducer.advance()
    state = job.store.read()
    assert state is not None and (state.version, state.closed) == (2, False)
    assert job.reducer.look_again_s == 0.25
    job.redis.hincrby(job.store.keys.round(), "opened", -200_000)
    assert job.reducer.advance()
    assert (state := job.store.read()) and state.version == 3


def test_what_arrives_in_a_round_makes_no_deadline_of_its_own(start: Callable[..., Job]) -> None:
    job, quick, slow = quorum_job(start)
    job.redis.ltrim(job.store.keys.arrivals(), 0, 6)  # one too few for a deadline
    half_round(job, quick, slow)
    assert job.redis.llen(job.store.keys.arrivals()) > 7
    assert (state := job.store.read()) and (state.version, state.closed) == (2, False)


def test_an_epochs_last_round_waits_for_everything(start: Callable[..., Job]) -> None:
    job, quick, slow = quorum_job(start, rounds=3)  # the job's last
    slow.pull()
    quick.send(quick.pull())
    job.redis.hincrby(job.store.keys.round(), "opened", -60_000)
    assert job.reducer.advance()
    assert (state := job.store.read()) and (state.version, state.closed) == (2, False)


def test_one_who_takes_over_a_closed_round_reduces_exactly_that(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, quick, slow = quorum_job(start)
    with monkeypatch.context() as patch:
        patch.setattr(RoundHandler, "_reduce", lambda *_: None)  # dies just after it has closed the round
        late, sent = half_round(job, quick, slow)
    assert (state := job.store.read()) and state.closed
    assert slow.send(late) == "lease_lost"
    job.reducer = job.new_reducer()
    assert job.reducer.advance()
    assert counted(job)[-1] == list(sent.micro_batches)


def test_one_who_takes_over_after_a_quorum_repeats_the_step_from_its_list(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, quick, slow = quorum_job(start)
    with monkeypatch.context() as patch:
        dies_before_the_state(patch)
        half_round(job, quick, slow)
    before = b"".join(job.reducer.handler.job.server_step.optimizer.dump())
    assert job.reducer.handler.current is not None
    job.reducer = job.new_reducer()
    job.reducer.advance()
    assert b"".join(job.reducer.handler.job.server_step.optimizer.dump()) == before
    assert (state := job.store.read()) and state.version == 3
    assert job.redis.exists(job.store.keys.state(str(state.token)))


def test_what_was_carried_comes_first_after_a_restore(start: Callable[..., Job]) -> None:
    job, quick, slow = quorum_job(start, checkpoint_every=3)
    late, _ = half_round(job, quick, slow)
    job.reducer.close()
    token = Artifacts(job.root, job.job_id).tokens()[-1]
    assert Artifacts(job.root, job.job_id).manifest(token).carried == late.micro_batches
    job.store.purge()
    job.store.publish(job.spec.model_dump_json())
    job.reducer = job.new_reducer()
    assert job.reducer.advance()
    another = job.hand("another")
    assert another.pull().micro_batches[: len(late.micro_batches)] == late.micro_batches


# A broker that goes back


def test_a_broker_that_went_back_behind_the_last_checkpoint_is_led_on_from_it(start: Callable[..., Job]) -> None:
    whole, job = start(), start()
    expected = whole.finish(whole.hand("solo"))
    hand = job.hand("solo")
    for _ in range(2):
        job.round(hand)
    names = list(job.redis.scan_iter(job.store.keys.pattern()))
    held = [(name, job.redis.dump(name)) for name in names]
    for _ in range(2):
        job.round(hand)  # version 3 is a checkpoint
    job.reducer.close()
    job.store.purge()
    for name, value in held:
        job.redis.restore(name, 0, value)
    job.reducer = job.new_reducer()
    assert job.reducer.advance()
    state = job.store.read()
    assert state is not None and (state.token.incarnation, state.version) == (2, 3)
    left = [name for name in job.redis.scan_iter(job.store.keys.pattern()) if b":1.2." in name or b":1.1." in name]
    assert left == []
    assert job.finish(job.hand("another")) == expected


# What checkpoints tell


def test_a_checkpoint_tells_of_the_versions_that_nobody_has_stored_yet(start: Callable[..., Job]) -> None:
    job = start(rounds=12)
    hand = job.hand("solo")
    artifacts = Artifacts(job.root, job.job_id)
    for _ in range(3):
        job.round(hand)
    wait_until(artifacts.tokens)
    for entry, _ in job.redis.xrange(job.store.keys.events()):  # type: ignore[union-attr]
        job.redis.xdel(job.store.keys.events(), entry)  # stored
    for _ in range(3):
        job.round(hand)
    job.reducer.close()
    told = {token.version: [e["data"]["version"] for e in artifacts.ledger(token)] for token in artifacts.tokens()}
    assert told == {3: [1, 2, 3], 6: [4, 5, 6]}
    last = artifacts.ledger(artifacts.tokens()[-1])[-1]["data"]
    assert [(worker, samples) for _, worker, samples in last["counted"]] == [("solo", 16)] * 4


def test_a_checkpoint_passes_on_what_the_one_before_a_restore_told(start: Callable[..., Job]) -> None:
    """The control plane is away all the time, and the broker is lost twice."""
    job = start(rounds=12)
    for restored in (0, 3, 6):
        if restored:
            job.reducer.close()
            job.store.purge()
            job.store.publish(job.spec.model_dump_json())
            job.reducer = job.new_reducer()
            assert job.reducer.advance()
        hand = job.hand("solo")
        for _ in range(4):
            job.round(hand)
    job.reducer.close()
    artifacts = Artifacts(job.root, job.job_id)
    token = artifacts.tokens()[-1]
    assert token.version == 9
    assert [entry["data"]["version"] for entry in artifacts.ledger(token)] == list(range(1, 10))


# What is refused before it costs anything


def test_an_oversized_blob_is_refused_without_being_read(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start()
    liar, honest = job.hand("liar"), job.hand("honest")
    grants = liar.pull(), honest.pull()
    liar.send(grants[0], first(lambda part: part + bytes(1 << 20)))
    honest.send(grants[1])
    read: list[int] = []
    updates = ReducerSession.updates

    def note(self: ReducerSession, wanted: Any, *rest: Any) -> Any:
        read.extend(number for _, number in wanted)
        return updates(self, wanted, *rest)

    monkeypatch.setattr(ReducerSession, "updates", note)
    assert job.reducer.advance()
    assert sorted(read) == list(grants[1].micro_batches)
    assert job.redis.hget(job.store.keys.strikes(), "liar") == b"1"


@pytest.mark.parametrize("several", [False, True], ids=["one bucket", "several buckets"])
def test_a_blob_that_the_broker_lost_is_computed_again_and_nobodys_strike(
    start: Callable[..., Job], several_buckets: Callable[[], None], several: bool
) -> None:
    if several:
        several_buckets()
    whole, job = start(), start()
    expected = whole.finish(whole.hand("solo"))
    hand = job.hand("solo")
    grant = hand.pull()
    hand.send(grant)
    job.redis.delete(job.store.keys.update(grant.token, grant.micro_batches[1]))
    assert job.reducer.advance()
    assert not job.redis.exists(job.store.keys.strikes())
    assert (state := job.store.read()) and state.version == 0
    assert job.finish(hand) == expected


def test_updates_are_read_in_pieces_and_give_the_same_bits(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, job = start(), start()
    expected = whole.finish(whole.hand("solo"))
    monkeypatch.setattr(gather, "PIECE_BYTES", 1)
    sizes: list[int] = []
    updates = ReducerSession.updates

    def note(self: ReducerSession, wanted: Any, *rest: Any) -> Any:
        sizes.append(len(wanted))
        return updates(self, wanted, *rest)

    monkeypatch.setattr(ReducerSession, "updates", note)
    assert job.finish(job.hand("solo")) == expected
    assert set(sizes) == {1}


# Models of several buckets


class Counted:
    """Remembers what a method returned."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self.results: list[Any] = []
        method = getattr(owner, name)

        def called(*arguments: Any) -> Any:
            self.results.append(method(*arguments))
            return self.results[-1]

        monkeypatch.setattr(owner, name, called)


@pytest.mark.parametrize(
    "strategy",
    [{}, {"combine": "median"}, {"combine": "trimmed_mean", "max_norm": 0.05}, {"max_norm": 0.05}],
    ids=["mean", "median", "trimmed and clipped", "clipped"],
)
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_a_model_of_several_buckets_comes_to_the_same_bits(
    start: Callable[..., Job],
    several_buckets: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    strategy: dict[str, Any],
    large: bool,
) -> None:
    document = {"strategy": {"kind": "sync", **strategy}, "rounds": 4}
    whole = start(**document)
    expected = whole.finish(whole.hand("solo"))
    several_buckets()
    begun = Counted(monkeypatch, ReducerSession, "begin")
    if large:  # updates are read one by one, ahead; versions are sent on before they have a name
        monkeypatch.setattr(gather, "PIECE_BYTES", 1)
        monkeypatch.setattr(reducer_session, "AT_ONCE_BYTES", 1000)
        monkeypatch.setattr(channel, "AT_ONCE_BYTES", 1000)
    job = start(**document)
    hand = job.hand("solo")
    assert len(hand.layout.buckets) == 4
    assert job.finish(hand) == expected
    assert len(begun.results) == 4 and all((not left) == large for left in begun.results)


def test_one_who_takes_over_between_commit_and_state_repeats_the_step_bucket_by_bucket(
    start: Callable[..., Job], several_buckets: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    several_buckets()
    whole, job = start(), start()
    expected = whole.finish(whole.hand("solo"))
    hand = job.hand("solo")
    with monkeypatch.context() as patch:
        dies_before_the_state(patch)
        job.round(hand)
    job.reducer = job.new_reducer()
    assert job.finish(hand) == expected


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda message: [*message[:3], bytes(message[3])[:-5], message[4]], "truncated"),
        (lambda message: message[:4], "truncated: part 1 of 2 is missing"),
        (lambda message: message[:2], "truncated: it has no frame for bucket 2"),
        (lambda message: [*message[:4], b"x"], "truncated"),
    ],
    ids=["last bucket", "no buffers", "half", "buffers"],
)
def test_garbage_in_any_bucket_is_refused_and_the_job_goes_on(
    start: Callable[..., Job], several_buckets: Callable[[], None], spoil: Spoil, reason: str
) -> None:
    several_buckets()
    whole, job = start(), start()
    expected = whole.finish(whole.hand("solo"))
    liar, honest = job.hand("liar"), job.hand("honest")
    grants = liar.pull(), honest.pull()
    assert [liar.send(grants[0], spoil), honest.send(grants[1])] == ["accepted", "accepted"]
    assert job.reducer.advance()
    told: Any = job.redis.xrange(job.store.keys.events())
    refused = [fields[b"data"].decode() for _, fields in told if fields[b"type"] == b"refused"]
    assert len(refused) == len(grants[0].micro_batches) and reason in refused[0]
    assert job.redis.hget(job.store.keys.strikes(), "liar") == b"1"
    while (state := job.store.read()) and state.version == 0:
        job.round(honest)
    assert job.finish(honest) == expected


def test_a_worker_weighs_what_the_plan_says_and_not_what_it_says_itself(start: Callable[..., Job]) -> None:
    job = start()
    hand = job.hand("solo")
    grant = hand.pull()
    updates = []
    for m in grant.micro_batches:
        update = hand.replica.compute(m)
        updates.append((m, encode_update(hand.up, update.vector, update.buffers, hand.layout, 0), update.loss))
    report = {"samples": 10**6, "counted": [[m, "solo", 10**6] for m in grant.micro_batches]}
    assert hand.session.submit(grant.token, "n", updates, report).outcome == "accepted"
    job.reducer.advance()
    events: Any = job.redis.xrange(job.store.keys.events())
    version = next(json.loads(fields[b"data"]) for _, fields in events if fields[b"type"] == b"version")
    assert {samples for _, _, samples in version["counted"]} == {16}


@pytest.mark.parametrize(
    "codec", [{}, {"down": "float16"}, {"up": "int8", "down": "bfloat16"}], ids=["exact", "half", "int8"]
)
def test_a_fork_begins_with_the_bits_of_its_parent(start: Callable[..., Job], codec: dict[str, str]) -> None:
    parent = start(codec=codec)
    parent.finish(parent.hand("solo"))
    digest = Artifacts(parent.root, parent.job_id).tokens()[0].digest16
    ends = []
    for with_state in (True, True, False):
        child = forked(start, parent, 3, with_state, codec=codec)
        assert child.reducer.advance()
        assert (child.store.read() or _none()).token == Token(1, 0, digest)
        ends.append(child.finish(child.hand("solo")))
    assert ends[0] == ends[1] != ends[2]  # Adam's moments are the parent's, or none


def test_a_fork_that_the_broker_lost_before_any_checkpoint_begins_again_at_its_origin(
    start: Callable[..., Job],
) -> None:
    parent = start()
    parent.finish(parent.hand("solo"))
    whole, lost = (forked(start, parent, 3, True, checkpoint_every=0) for _ in range(2))
    assert whole.reducer.advance() and lost.reducer.advance()
    expected = whole.finish(whole.hand("solo"))
    lost.round(lost.hand("solo"))
    origin = lost.store.redis.get(lost.store.keys.origin()).decode()  # type: ignore[union-attr]
    lost.reducer.close()
    lost.store.purge()
    lost.store.publish(lost.spec.model_dump_json(), origin)
    lost.reducer = lost.new_reducer()
    assert lost.reducer.advance()
    state = lost.store.read()
    assert state is not None and (state.token.incarnation, state.version) == (2, 0)
    assert lost.finish(lost.hand("another")) == expected


@pytest.mark.parametrize("missing", ["weights.safetensors", "state.safetensors"])
def test_a_fork_without_its_origin_fails_instead_of_starting_from_the_seed(
    start: Callable[..., Job], missing: str
) -> None:
    parent = start()
    parent.finish(parent.hand("solo"))
    child = forked(start, parent, 3, True)
    artifacts = Artifacts(child.root, child.job_id)
    artifacts.path(artifacts.tokens()[0], missing).unlink()
    with pytest.raises(ArtifactError, match="forked from are missing or damaged"):
        child.reducer.advance()
    assert child.store.read() is None


def test_a_fork_of_a_damaged_state_is_refused(start: Callable[..., Job]) -> None:
    parent = start()
    parent.finish(parent.hand("solo"))
    artifacts = Artifacts(parent.root, parent.job_id)
    path = artifacts.path(artifacts.tokens()[0], "state.safetensors")
    path.write_bytes(flipped(path.read_bytes(), -5 % path.stat().st_size))
    with pytest.raises(ArtifactError, match="is damaged: fork another one"):
        forked(start, parent, 3, True)


def test_a_forks_origin_outlives_its_parent_and_every_later_checkpoint(start: Callable[..., Job]) -> None:
    parent = start()
    parent.finish(parent.hand("solo"))
    child = forked(start, parent, 3, True, checkpoint_every=0)
    Artifacts(parent.root, parent.job_id).delete()
    artifacts = Artifacts(child.root, child.job_id)
    artifacts.save_score(artifacts.tokens()[0], {"accuracy": 0.1})
    assert child.reducer.advance()
    child.finish(child.hand("solo"))
    assert [token.version for token in artifacts.tokens()] == [0, 6]


def _none() -> Any:
    raise AssertionError("the job is not open")
