"""Versions that a seat reads while it computes, of which the newest two are kept."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from computeshare.codecs import messages
from computeshare.protocol.worker_session import WorkerSession
from computeshare.tensors import layout
from computeshare.types import Token
from computeshare.worker.seat.drafts.draft_reader import DraftReader
from computeshare.worker.seat.overlap.version_reader import KEPT, VersionReader
from computeshare.worker.seat.weights_receiver import WeightsReceiver
from tests.support.drafts import Sending
from tests.support.job_reducer import Hand, Job
from tests.support.wait import wait_until


def advance(job: Job, hand: Hand, inbox: WeightsReceiver) -> Token:
    """The next version, of updates that the hand computes on the versions that its leases name."""
    while (grant := hand.session.lease("")).answer == "leased":
        weights = inbox.fetch(hand.session, grant.token)
        assert weights is not None
        hand.replica.load(weights)
        assert hand.send(grant) == "accepted"
    job.reducer.advance()
    state = job.store.read()
    assert state is not None
    return state.token


def digest_of(hand: Hand, versions: VersionReader, token: Token) -> str:
    """The digest of the weights that are given as version `token`."""
    given: list[str] = []
    assert versions.give(hand.session, str(token), lambda weights: given.append(hand.layout.digest(weights)[:16]))
    return given[0]


@pytest.mark.parametrize("codec", ["float32", "int8", "lowrank2"])
def test_the_version_before_the_newest_is_given_without_being_read_again(start: Callable[..., Job], codec: str) -> None:
    job = start(strategy={"kind": "sync", "delay": 1}, codec={"up": "float16", "down": codec})
    hand = job.hand("a")
    inbox = WeightsReceiver(hand.session, codec, hand.layout)
    own = WorkerSession(job.redis, job.job_id, "a", hand.session.session_id)
    with VersionReader(own, WeightsReceiver(own, codec, hand.layout, kept=KEPT)) as versions:
        for _ in range(4):
            before, newest = job.store.read().token, advance(job, hand, inbox)  # type: ignore[union-attr]
            wait_until(lambda token=str(newest): token in versions._held, 5)
            read = versions.bytes
            for token in (before, newest, before):
                assert digest_of(hand, versions, token) == token.digest16
            assert versions.bytes == read and len(versions._held) == KEPT


@pytest.mark.parametrize("codec", ["float32", "int8"])
def test_parts_of_the_next_version_are_read_before_its_commit_and_change_no_version_that_is_kept(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    monkeypatch.setattr(layout, "BUCKET", 5000)
    monkeypatch.setattr(messages, "NEWS_BYTES", 0)
    job = start(strategy={"kind": "sync", "delay": 1}, codec={"up": "float16", "down": codec})
    hand = job.hand("a")
    inbox = WeightsReceiver(hand.session, codec, hand.layout, kept=KEPT)
    own, reads = (WorkerSession(job.redis, job.job_id, "a", hand.session.session_id) for _ in range(2))
    with (
        DraftReader(reads) as drafts,
        VersionReader(own, WeightsReceiver(own, codec, hand.layout, drafts=drafts, kept=KEPT)) as versions,
    ):
        waiting = list[Sending]()
        for _ in range(5):
            state = job.store.read()
            assert state is not None
            wait_until(lambda token=str(state.token): token in versions._held, 5)
            while (grant := hand.session.lease("")).answer == "leased":
                weights = inbox.fetch(hand.session, grant.token)
                assert weights is not None
                hand.replica.load(weights)
                waiting.append(Sending(hand, grant))
                waiting[-1].offer(3, 2, 1)
            job.reducer.advance()
            wait_until(lambda: drafts._parts.keys() == {1, 2, 3}, 5)
            for token in filter(None, (state.base, state.token)):
                assert digest_of(hand, versions, token) == token.digest16
            read = versions.bytes
            for sending in [one for one in waiting if min(one.messages) in state.units]:
                waiting.remove(sending)
                assert sending.submit() == "accepted"
            job.reducer.advance()
            token = job.store.read().token  # type: ignore[union-attr]
            wait_until(lambda token=str(token): token in versions._held, 5)
            for kept in (state.token, token):
                assert digest_of(hand, versions, kept) == kept.digest16
            keys = job.store.keys
            whole = job.redis.hvals(keys.delta(str(token))) or job.redis.hvals(keys.weights(str(token)))
            assert versions.bytes - read == sum(map(len, whole)), "each part once"


def test_of_differences_two_versions_that_came_at_once_are_both_kept(start: Callable[..., Job]) -> None:
    job = start(strategy={"kind": "sync", "delay": 1}, codec={"up": "int8", "down": "int8"})
    hand = job.hand("a")
    inbox = WeightsReceiver(hand.session, "int8", hand.layout)
    tokens = [str(advance(job, hand, inbox)) for _ in range(3)]
    own = WorkerSession(job.redis, job.job_id, "a", hand.session.session_id)
    with VersionReader(own, WeightsReceiver(own, "int8", hand.layout, kept=KEPT)) as versions:
        wait_until(lambda: tokens[-1] in versions._held, 5)
        assert [*versions._held] == tokens[-2:]


@pytest.mark.parametrize("codec", ["float32", "int8"])
def test_a_version_stays_as_it_was_when_the_read_after_it_fails(start: Callable[..., Job], codec: str) -> None:
    job = start(strategy={"kind": "sync", "delay": 1}, codec={"up": "float16", "down": codec})
    hand = job.hand("a")
    inbox, kept = (
        WeightsReceiver(hand.session, codec, hand.layout),
        WeightsReceiver(hand.session, codec, hand.layout, kept=KEPT),
    )
    for _ in range(3):
        token = advance(job, hand, inbox)
        weights = kept.fetch(hand.session, str(token))
    assert weights is not None and kept.fetch(hand.session, str(replace(token, version=99))) is None
    assert kept.fetch(hand.session, str(advance(job, hand, inbox)))
    assert hand.layout.digest(weights)[:16] == token.digest16
