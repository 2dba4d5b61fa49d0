"""How a seat gets versions: what it reads of them, and what it need not read."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from computeshare.queue import Seat
from computeshare.settings import Settings
from computeshare.tasks.modules import weights_of
from computeshare.tensors.layout import Weights
from computeshare.worker.seat.seat import SeatSession
from computeshare.worker.seat.weights_receiver import WeightsReceiver
from tests.support.job_reducer import Hand, Job
from tests.support.wait import wait_until


def began(job: Job) -> tuple[Hand, str, Weights]:
    """A hand, the token of version 0, and the weights that the hand's model began with."""
    hand, state = job.hand("a"), job.store.read()
    assert state is not None
    return hand, str(state.token), weights_of(hand.module, hand.layout)


@pytest.mark.parametrize("codec", ["float32", "float16", "int8", "lowrank2"])
def test_a_version_that_this_machine_has_built_is_not_read(start: Callable[..., Job], codec: str) -> None:
    job = start(codec={"up": "float16", "down": codec})
    hand, first, built = began(job)
    inbox = WeightsReceiver(hand.session, codec, hand.layout, built=built)
    weights, grant = inbox.pull(first)
    assert weights is not None and inbox.is_right() and inbox.bytes == 0
    while grant.answer == "leased":
        hand.replica.load(weights)
        hand.send(grant)
        grant = hand.session.lease(first)
    job.reducer.advance()
    state = job.store.read()
    assert state is not None and state.token.version == 1
    weights, _ = inbox.pull(str(state.token))
    assert weights is not None and inbox.is_right() and inbox.bytes > 0
    assert hand.layout.digest(weights)[:16] == state.token.digest16


def advanced(job: Job, hand: Hand, versions: int) -> str:
    """The current token, after so many rounds by this hand."""
    inbox = WeightsReceiver(hand.session, job.spec.codecs.down, hand.layout)
    for version in range(versions + 1):
        state = job.store.read()
        assert state is not None and state.token.version == version
        if version < versions:
            weights, grant = inbox.pull(str(state.token))
            assert weights is not None
            hand.replica.load(weights)
            hand.send(grant)
            job.reducer.advance()
    return str(state.token)


@pytest.mark.parametrize("while_computing", [False, True])
@pytest.mark.parametrize("codec", ["int8", "lowrank2"])
def test_who_joins_later_adds_differences_to_what_this_machine_has_built(
    start: Callable[..., Job], codec: str, while_computing: bool
) -> None:
    job = start(codec={"up": "float16", "down": codec})
    hand, _, built = began(job)
    size, token = built.parameters.nbytes, advanced(job, hand, 2)
    inbox = WeightsReceiver(hand.session, codec, hand.layout, built=built)
    weights = inbox.fetch(hand.session, token) if while_computing else inbox.pull(token)[0]
    assert weights is not None and inbox.is_right() and 0 < inbox.bytes < size
    whole = WeightsReceiver(hand.session, codec, hand.layout)
    assert whole.pull(token)[0] is not None and whole.bytes > inbox.bytes + size
    assert hand.layout.digest(weights)[:16] == token[-16:]


@pytest.mark.parametrize(("versions", "changed_by"), [(2, 1.0), (6, 0.0)])
def test_who_joins_later_reads_a_snapshot_where_what_it_has_built_leads_nowhere(
    start: Callable[..., Job], versions: int, changed_by: float
) -> None:
    """Other weights than version 0's; and those of version 0 while the way from a newer snapshot is shorter."""
    job = start(codec={"up": "float16", "down": "int8"}, rounds=20)
    hand, first, built = began(job)
    token = advanced(job, hand, versions)
    assert (first == hand.session.snapshot()) == (changed_by > 0)
    built.parameters[0] += changed_by
    inbox = WeightsReceiver(hand.session, "int8", hand.layout, built=built)
    weights, _ = inbox.pull(token)
    assert weights is not None and inbox.is_right() and inbox.bytes > built.parameters.nbytes


@pytest.mark.parametrize("codec", ["float32", "int8"])
def test_a_version_of_other_weights_than_those_built_is_read(start: Callable[..., Job], codec: str) -> None:
    hand, first, built = began(start(codec={"up": "float16", "down": codec}))
    built.parameters[0] += 1
    inbox = WeightsReceiver(hand.session, codec, hand.layout, built=built)
    weights, _ = inbox.pull(first)
    assert weights is not None and inbox.is_right() and inbox.bytes > built.parameters.nbytes


def test_who_reads_while_it_computes_does_not_read_them_either(start: Callable[..., Job]) -> None:
    hand, first, built = began(start())
    inbox = WeightsReceiver(hand.session, "float32", hand.layout, built=built)
    weights = inbox.fetch(hand.session, first)
    assert weights is not None and inbox.is_right() and inbox.bytes == 0
    assert inbox.fetch(hand.session, first) is not None and inbox.bytes > 0


def test_a_seat_elsewhere_computes_on_what_it_has_built(
    start: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start(rounds=1)
    _, first, _ = began(job)
    monkeypatch.setattr("computeshare.worker.seat.device_setup.is_next_door", lambda redis: False)
    job.redis.delete(job.store.keys.weights(first), job.store.keys.news(first))
    seat = Seat("aaaaaaaaaaaa", job.job_id, 1, 1)
    job.redis.hset(job.store.keys.seats(), seat.worker, seat.id)
    session = SeatSession(job.redis, seat, job.spec, Settings(home=tmp_path), threading.Event())
    thread = threading.Thread(target=session.run, args=("cpu",))
    thread.start()
    wait_until(lambda: not job.reducer.advance())
    thread.join(30)
    assert not thread.is_alive()
