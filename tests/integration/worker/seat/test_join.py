"""A seat that joins a job which is not open."""

import secrets
import threading
from pathlib import Path

import pytest
from redis import Redis

from computeshare.protocol.round_store import RoundStore
from computeshare.queue import Seat
from computeshare.settings import Settings
from computeshare.worker.seat import seat as seat_module
from computeshare.worker.seat.seat import SeatSession
from tests.support.job_reducer import spec_of


def test_a_seat_ends_whose_job_is_not_in_the_broker_any_more(
    redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that comes back empty gets the jobs that go on, and no job that ended while the seat loaded."""
    monkeypatch.setattr(seat_module, "UNKNOWN_S", 1.5)
    stop = threading.Event()
    session = SeatSession(
        redis, Seat("aaaaaaaaaaaa", secrets.token_hex(4), 1, 1), spec_of(), Settings(home=tmp_path), stop
    )
    over = threading.Timer(20, stop.set)
    over.start()
    try:
        assert session.run(None) == "the job is gone"
    finally:
        over.cancel()


def test_a_seat_waits_until_its_job_is_published_and_opened(
    redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seat_module, "UNKNOWN_S", 4.0)
    job_id, stop = secrets.token_hex(4), threading.Event()
    rounds, spec = RoundStore(redis, job_id), spec_of()
    session = SeatSession(redis, Seat("aaaaaaaaaaaa", job_id, 1, 1), spec, Settings(home=tmp_path), stop)
    threading.Timer(2, rounds.publish, [spec.model_dump_json()]).start()
    threading.Timer(8, stop.set).start()
    assert session.run(None) == "the worker was asked to leave"
