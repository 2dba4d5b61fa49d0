"""A seat's RQ job can be nothing but a seat."""

import json
import zlib
from typing import Any

import pytest
from fakeredis import FakeRedis
from rq.exceptions import NoSuchJobError
from rq.serializers import JSONSerializer

from computeshare.queue.seats import FUNCTION, Seat, SeatJob
from computeshare.runtime.signatures import SigningKey

SEAT = Seat("0123456789ab", "job12345", 3, 2)


def restore(data: bytes, kind: type[SeatJob] = SeatJob, **fields: bytes) -> SeatJob:
    job = kind(SEAT.id, connection=FakeRedis(), serializer=JSONSerializer)
    raw = {b"data": data, b"created_at": b"2026-01-01T00:00:00.000000Z", b"status": b"queued"}
    job.restore({**raw, **{name.encode(): value for name, value in fields.items()}})
    return job


def call(function: Any = FUNCTION, instance: Any = None, arguments: Any = (SEAT.id,), named: Any = None) -> bytes:
    return zlib.compress(json.dumps([function, instance, list(arguments), named or {}]).encode())


def test_a_seat_is_restored() -> None:
    job = restore(call(), origin=b"0123456789ab")
    assert (job.func_name, list(job.args), job.kwargs) == (FUNCTION, [SEAT.id], {})


def test_a_seats_id_is_read_back() -> None:
    assert SEAT.id == "0123456789ab-job12345-3-2"
    assert Seat.parse(SEAT.id) == SEAT


@pytest.mark.parametrize(
    "text", ["", "a-b-1-1", "0123456789ab-job12345-3", "0123456789ab-job12345-3-2-1", "../../x-1-1-1"]
)
def test_anything_else_is_no_seat(text: str) -> None:
    with pytest.raises(ValueError, match="not a seat"):
        Seat.parse(text)


@pytest.mark.parametrize(
    "data",
    [
        call("os.system", arguments=["true"]),
        call("builtins.exec", arguments=["pass"]),
        call(arguments=["0123456789ab-job12345-3-3"]),
        call(arguments=[SEAT.id, "more"]),
        call(named={"x": 1}),
        call(instance={"x": 1}),
        b"",
        b"garbage",
        zlib.compress(b"garbage"),
        zlib.compress(b"[" * 4000),
        zlib.compress(bytes(50_000_000)),
        bytes(10_000),
    ],
)
def test_any_other_call_is_refused(data: bytes) -> None:
    with pytest.raises(NoSuchJobError, match="refused RQ job"):
        restore(data)


KEY, OTHER = SigningKey.new(), SigningKey.new()
MINE = (SEAT.id, SEAT.worker, FUNCTION, [SEAT.id])


def meta(key: SigningKey = KEY, about: tuple[Any, ...] = MINE) -> bytes:
    return json.dumps({"signature": key.sign("seat", *about)}).encode()


def test_a_seat_that_the_control_plane_has_signed_is_restored_without_its_meta() -> None:
    job = restore(call(), SeatJob.of(SEAT.worker, KEY.public), origin=SEAT.worker.encode(), meta=meta())
    assert list(job.args) == [SEAT.id] and job.meta == {}


@pytest.mark.parametrize(
    "signed",
    [
        b"",
        b"[]",
        b"{",
        b'{"signature": 7}',
        b"[" * 100_000,
        b'{"signature": "' + b"0" * 128 + b'"}',
        meta(OTHER),
        meta(about=("another", *MINE[1:])),
        meta(about=(SEAT.id, "another", *MINE[2:])),
        meta(about=(*MINE[:2], "os.system", [SEAT.id])),
    ],
)
def test_a_seat_that_it_has_not_signed_is_refused(signed: bytes) -> None:
    with pytest.raises(NoSuchJobError, match="not signed"):
        restore(call(), SeatJob.of(SEAT.worker, KEY.public), origin=SEAT.worker.encode(), meta=signed)


def test_a_seat_of_another_worker_is_refused_though_it_is_signed() -> None:
    with pytest.raises(NoSuchJobError, match="not signed"):
        restore(call(), SeatJob.of("another0", KEY.public), origin=SEAT.worker.encode(), meta=meta())
    with pytest.raises(NoSuchJobError, match="not signed"):
        restore(call(), SeatJob.of("another0", KEY.public), origin=b"another0", meta=meta())
    with pytest.raises(NoSuchJobError, match="not signed"):
        restore(call(), SeatJob.of("another0", ""), origin=SEAT.worker.encode())


def test_callbacks_webhooks_and_the_like_are_dropped() -> None:
    job = restore(
        call(),
        success_callback_name=b"os.system",
        failure_callback_name=b"os.system",
        stopped_callback_name=b"os.system",
        webhooks=b'[{"url": "http://127.0.0.1/"}]',
        dependency_ids=b'["x"]',
        group_id=b"g",
        repeats_left=b"5",
        retries_left=b"5",
        rate_limit_key=b"k",
        meta=b"{}",
    )
    assert job.success_callback is None and job.failure_callback is None and job.stopped_callback is None
    assert not job.webhooks and not job._dependency_ids and job.group_id is None
    assert job.repeats_left is None and job.retries_left is None and job.rate_limit_key is None
