"""Updates that are sent part by part while the rest is computed."""

import threading
from typing import Any

import numpy as np
import pytest
from redis.exceptions import OutOfMemoryError

from computeshare.codecs.messages import UpdateEncoder, encode_update, feedback_of
from computeshare.codecs.registry import CODECS
from computeshare.errors import Interrupted
from computeshare.protocol.reducer_session import ReducerSession
from computeshare.protocol.worker_session import WorkerSession
from computeshare.tensors.layout import Layout
from computeshare.types import Blob, Vector
from computeshare.worker.seat.update_sender import UpdateQueue
from tests.support.rounds import PLAN, ZERO, Join, parts
from tests.support.wait import wait_until

BUCKETS = 3
CODEC = CODECS["float32"]
RNG = np.random.default_rng(0)
VECTORS = [RNG.random(BUCKETS * 1000 - 10).astype(np.float32) for _ in range(2)]
BUFFERS = RNG.random(7).astype(np.float32)


@pytest.fixture
def layout(monkeypatch: pytest.MonkeyPatch) -> Layout:
    """A model of a few buckets, each large enough to be sent by itself."""
    monkeypatch.setattr("computeshare.tensors.layout.BUCKET", 1000)
    monkeypatch.setattr("computeshare.worker.seat.update_sender.AHEAD_BYTES", 2000)
    return Layout.build(iter([("w", (BUCKETS * 1000 - 10,), "parameter"), ("b", (7,), "buffer")]))


def outbox_of(session: WorkerSession, layout: Layout) -> UpdateQueue:
    return UpdateQueue(session, UpdateEncoder(CODEC, layout))


def take(outbox: UpdateQueue, layout: Layout, unit: int, vector: Vector) -> None:
    """As the backward pass does: the last bucket first, and in memory that is used again."""
    room = np.empty(1000, np.float32)
    taker = outbox.taker(unit, PLAN.generator_seed(unit))
    for bucket, where in reversed([*enumerate(layout.buckets)]):
        values = room[: where.stop - where.start]
        np.copyto(values, vector[where])
        taker(bucket, values)
        room.fill(-1)
    outbox.complete(unit, BUFFERS, 0.5)


def submit(outbox: UpdateQueue) -> str:
    return outbox.submit(str(ZERO), {}, None).outcome


def staged(reducer: ReducerSession, outbox: UpdateQueue, unit: int) -> set[int]:
    """The parts of a unit's update that have arrived."""
    names: Any = reducer.redis.hkeys(reducer.keys.staged(f"{outbox._session.worker_id}:{outbox.nonce}:{unit}"))
    return set(map(int, names))


def held(reducer: ReducerSession, layout: Layout) -> list[Any]:
    wanted = [(part.base, part.micro_batch) for part in parts(reducer)]
    return reducer.updates(wanted, range(BUCKETS + 1))


def messages(layout: Layout) -> list[Any]:
    """What comes to the reducer, sent in one piece."""
    return [
        [bytes(part) for part in encode_update(CODEC, vector, BUFFERS, layout, PLAN.generator_seed(unit))]
        for unit, vector in enumerate(VECTORS)
    ]


def test_what_is_large_has_arrived_before_it_is_submitted(
    reducer: ReducerSession, join: Join, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, _ = join("a"), join("another")
    assert session.lease(str(ZERO)).micro_batches == (0, 1)
    outbox = outbox_of(session, layout)
    for unit, vector in enumerate(VECTORS):
        take(outbox, layout, unit, vector)
    submitted, send = list[Any](), session.submit

    def note(token: str, nonce: str, updates: Any, *rest: Any) -> Any:
        submitted.append(updates)
        assert [staged(reducer, outbox, unit) for unit in (0, 1)] == [{*range(BUCKETS)}] * 2
        return send(token, nonce, updates, *rest)

    monkeypatch.setattr(session, "submit", note)
    assert outbox.bytes == sum(len(part) for message in messages(layout) for part in message)
    assert submit(outbox) == "accepted"
    assert [[part is None for part in message] for _, message, _ in submitted[0]] == [[True] * BUCKETS + [False]] * 2
    assert held(reducer, layout) == messages(layout)


@pytest.mark.parametrize("are_right", [True, False])
def test_buffers_that_were_taken_are_sent_ahead_and_again_if_they_have_changed(
    are_right: bool, reducer: ReducerSession, join: Join, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backward passes that repeat a part of the forward pass update the statistics of a batch normalisation again."""
    monkeypatch.setattr("computeshare.worker.seat.update_sender.OFFERING_S", 0)
    session, _ = join("a"), join("another")
    assert session.lease(str(ZERO)).micro_batches == (0, 1)
    outbox = UpdateQueue(session, UpdateEncoder(CODEC, layout), offers=True)
    outbox.begin(str(ZERO))
    sent, stage = list[int](), session.stage
    monkeypatch.setattr(session, "stage", lambda *about: (sent.extend(about[2]), stage(*about)))
    for unit, vector in enumerate(VECTORS):
        taker = outbox.taker(unit, PLAN.generator_seed(unit))
        taker(BUCKETS, BUFFERS if are_right else BUFFERS + 1)
        for bucket, where in enumerate(layout.buckets):
            taker(bucket, vector[where])
        outbox.complete(unit, BUFFERS, 0.5)
    assert submit(outbox) == "accepted"
    assert sent[0] == BUCKETS and sorted(set(sent)) == [*range(BUCKETS + 1)]
    assert held(reducer, layout) == messages(layout)
    before = len(sent)
    outbox.begin(str(ZERO))
    outbox.taker(2, 0)(BUCKETS, BUFFERS)
    outbox._settle()
    assert sent[before:] == [BUCKETS] * are_right, "whose buffers change sends them once they are final"


def test_buffers_that_changed_go_with_the_submission_if_the_broker_did_not_take_them_again(
    reducer: ReducerSession, join: Join, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, _ = join("a"), join("another")
    assert session.lease(str(ZERO)).micro_batches == (0, 1)
    outbox, stage = UpdateQueue(session, UpdateEncoder(CODEC, layout), offers=True), session.stage
    outbox.begin(str(ZERO))
    for unit, vector in enumerate(VECTORS):
        taker = outbox.taker(unit, PLAN.generator_seed(unit))
        monkeypatch.setattr(session, "stage", stage)
        taker(BUCKETS, BUFFERS + 1)
        outbox._settle()

        def refuse(*_: Any) -> None:
            raise OutOfMemoryError("no room")

        monkeypatch.setattr(session, "stage", refuse)
        for bucket, where in enumerate(layout.buckets):
            taker(bucket, vector[where])
        outbox.complete(unit, BUFFERS, 0.5)
    assert submit(outbox) == "accepted"
    assert held(reducer, layout) == messages(layout)


def test_what_the_broker_did_not_take_ahead_goes_with_the_submission(
    reducer: ReducerSession, join: Join, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, _ = join("a"), join("another")
    stage, sent = session.stage, list[int]()

    def refuse(nonce: str, unit: int, parts: Any, offered_on: str) -> None:
        sent.extend(parts)
        if len(sent) == 2:
            raise OutOfMemoryError("no room")
        stage(nonce, unit, parts, offered_on)

    monkeypatch.setattr(session, "stage", refuse)
    assert session.lease(str(ZERO)).micro_batches == (0, 1)
    outbox = outbox_of(session, layout)
    for unit, vector in enumerate(VECTORS):
        take(outbox, layout, unit, vector)
    assert submit(outbox) == "accepted"
    assert sent == [2, 1] and held(reducer, layout) == messages(layout)


def test_who_finds_no_room_holds_nothing_while_waiting_for_it(
    reducer: ReducerSession, join: Join, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, _ = join("a"), join("another")
    session.lease(str(ZERO))
    outbox = outbox_of(session, layout)
    for unit, vector in enumerate(VECTORS):
        take(outbox, layout, unit, vector)
    with monkeypatch.context() as patch:
        patch.setattr(session, "submit", full)
        with pytest.raises(OutOfMemoryError):
            submit(outbox)
    assert [staged(reducer, outbox, unit) for unit in (0, 1)] == [set(), set()]
    assert submit(outbox) == "accepted"
    assert held(reducer, layout) == messages(layout)


def test_who_finds_no_room_for_an_update_of_several_workers_does_not_send_it_without_their_parts(
    reducer: ReducerSession, join: Join, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, _ = join("a"), join("another")
    session.lease(str(ZERO))
    outbox = outbox_of(session, layout)
    take(outbox, layout, 0, VECTORS[0])
    outbox.share(0)
    outbox.arrived(0, [0], 4000)
    monkeypatch.setattr(session, "submit", full)
    with pytest.raises(Interrupted, match="other workers"):
        submit(outbox)


def full(*_: object) -> None:
    raise OutOfMemoryError("no room")


def test_updates_of_one_bucket_go_in_one_exchange(
    reducer: ReducerSession, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("computeshare.worker.seat.update_sender.AHEAD_BYTES", 1)
    session = join("a")
    monkeypatch.setattr(session, "stage", full)
    assert session.lease(str(ZERO)).answer == "leased"
    outbox = outbox_of(session, Layout.build(iter([("w", (5000,), "parameter")])))
    outbox.taker(0, 0)(0, np.ones(5000, np.float32))
    outbox.complete(0, np.empty(0, np.float32), 0.5)
    assert submit(outbox) == "accepted"


def test_updates_that_are_dropped_leave_the_wire_to_others_and_the_broker_empty(
    reducer: ReducerSession, join: Join, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = join("a")
    stage, sent, goes_on = session.stage, list[int](), threading.Event()

    def hold(nonce: str, unit: int, parts: Any, offered_on: str) -> None:
        sent.extend(parts)
        assert goes_on.wait(10)
        stage(nonce, unit, parts, offered_on)

    monkeypatch.setattr(session, "stage", hold)
    session.lease(str(ZERO))
    outbox = outbox_of(session, layout)
    take(outbox, layout, 0, VECTORS[0])
    threading.Timer(0.1, goes_on.set).start()
    outbox.drop()
    assert sent == [2] and staged(reducer, outbox, 0) == {2}  # the one under way
    outbox.forget()
    assert staged(reducer, outbox, 0) == set()
    assert session.lease(str(ZERO)).answer == "wait"
    nonce = outbox.nonce
    outbox.begin()
    assert outbox.nonce != nonce
    for unit, vector in enumerate(VECTORS):
        take(outbox, layout, unit, vector)
    assert submit(outbox) == "accepted"
    assert held(reducer, layout) == messages(layout)


def test_parts_that_the_broker_lost_cost_the_lease_and_no_more(
    reducer: ReducerSession, join: Join, layout: Layout
) -> None:
    session, _ = join("a"), join("another")
    assert session.lease(str(ZERO)).micro_batches == (0, 1)
    outbox = outbox_of(session, layout)
    for unit, vector in enumerate(VECTORS):
        take(outbox, layout, unit, vector)
    outbox.drop()
    outbox._goes_ahead = True
    reducer.redis.unlink(reducer.keys.staged(f"{outbox._session.worker_id}:{outbox.nonce}:0"))
    take(outbox, layout, 1, VECTORS[1])
    receipt = outbox.submit(str(ZERO), {}, None)
    assert receipt.outcome == "accepted" and [part.micro_batch for part in parts(reducer)] == [1]
    assert receipt.grant is not None and receipt.grant.micro_batches == (0, 2)  # it can be had again


def test_error_feedback_is_the_same_in_any_order_of_buckets(layout: Layout) -> None:
    codec = CODECS["topk"]
    one, other = (UpdateEncoder(codec, layout, feedback_of(codec, layout)) for _ in range(2))
    for _ in range(3):
        expected = one.whole(VECTORS[0], BUFFERS, 5)
        parts = {b: other.part(b, VECTORS[0][w], 5) for b, w in reversed([*enumerate(layout.buckets)])}
        assert [bytes(parts[b]) for b in range(BUCKETS)] == [bytes(part) for part in expected[:-1]]


def test_over_a_link_every_part_is_sent_ahead_and_offered(
    reducer: ReducerSession, join: Join, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("computeshare.worker.seat.update_sender.AHEAD_BYTES", 10_000)
    session, _ = join("a", parts=BUCKETS + 1), join("another")
    assert session.lease(str(ZERO)).micro_batches == (0, 1)
    outbox = UpdateQueue(session, UpdateEncoder(CODEC, layout), offers=True)
    outbox.begin(str(ZERO))
    for unit, vector in enumerate(VECTORS):
        take(outbox, layout, unit, vector)
    outbox._settle()
    assert [staged(reducer, outbox, unit) for unit in range(2)] == [{*range(BUCKETS + 1)}] * 2
    offers = reducer.offers()
    assert {unit: offer.parts for unit, offer in offers.items()} == {unit: {0, 1, 2, 3} for unit in (0, 1)}
    assert {(offer.worker, offer.nonce) for offer in offers.values()} == {("a", outbox.nonce)}
    assert submit(outbox) == "accepted" and reducer.offers() == {}
    assert held(reducer, layout) == messages(layout)


@pytest.mark.parametrize(("at_once_s", "groups"), [(0.0, [1] * (BUCKETS + 1)), (1000.0, [1, BUCKETS])])
def test_fewer_parts_are_sent_at_once_where_they_take_longer(
    join: Join, layout: Layout, monkeypatch: pytest.MonkeyPatch, at_once_s: float, groups: list[int]
) -> None:
    for name, value in {"AHEAD_BYTES": 1 << 20, "AT_ONCE_BYTES": 1, "AT_ONCE_S": at_once_s}.items():
        monkeypatch.setattr(f"computeshare.worker.seat.update_sender.{name}", value)
    session, _ = join("a", parts=BUCKETS + 1), join("another")
    assert session.lease(str(ZERO)).micro_batches == (0, 1)
    outbox = UpdateQueue(session, UpdateEncoder(CODEC, layout), offers=True)
    outbox.begin(str(ZERO))
    sent, goes, stage = list[int](), threading.Event(), session.stage

    def held_up(nonce: str, unit: int, parts: dict[int, Blob], token: str) -> None:
        sent.append(len(parts))
        assert goes.wait(10)
        stage(nonce, unit, parts, token)

    monkeypatch.setattr(session, "stage", held_up)
    taker = outbox.taker(0, PLAN.generator_seed(0))
    for bucket, where in enumerate(layout.buckets):
        taker(bucket, VECTORS[0][where])
        wait_until(lambda: sent == [1], 10)  # the others are ready while the first is sent
    outbox.complete(0, BUFFERS, 0.5)
    goes.set()
    outbox._settle()
    assert sent == groups


@pytest.mark.parametrize(("least_s", "is_offered"), [(0.0, True), (1000.0, False)])
def test_parts_are_offered_again_only_if_the_submission_before_took_long_to_send(
    reducer: ReducerSession,
    join: Join,
    layout: Layout,
    monkeypatch: pytest.MonkeyPatch,
    least_s: float,
    is_offered: bool,
) -> None:
    session, _ = join("a", parts=BUCKETS + 1), join("another")
    outbox = UpdateQueue(session, UpdateEncoder(CODEC, layout), offers=True)
    monkeypatch.setattr("computeshare.worker.seat.update_sender.OFFERING_S", least_s)
    assert session.lease(str(ZERO)).micro_batches == (0, 1)
    for unit, expected in ((0, True), (1, is_offered)):
        outbox.begin(str(ZERO))
        take(outbox, layout, unit, VECTORS[unit])
        outbox._settle()
        assert (unit in reducer.offers()) == expected
        assert submit(outbox) == "accepted"
