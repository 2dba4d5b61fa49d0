"""A seat that joins a job which is not open."""

import secrets
import threading
from pathlib import Path

from redis import Redis

from computeshare.protocol.round_store import RoundStore
from computeshare.queue import Seat
from computeshare.settings import Settings
from computeshare.worker.seat.seat import SeatSession
from tests.support.job_reducer import spec_of


def test_a_seat_ends_whose_job_is_not_in_the_broker_any_more(redis: Redis, tmp_path: Path) -> None:
    """A broker that comes back empty gets the jobs that go on, and no job that ended while the seat loaded."""
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


def test_a_seat_waits_until_its_job_is_opened(redis: Redis, tmp_path: Path) -> None:
    job_id, stop = secrets.token_hex(4), threading.Event()
    RoundStore(redis, job_id).publish(spec_of().model_dump_json())
    session = SeatSession(redis, Seat("aaaaaaaaaaaa", job_id, 1, 1), spec_of(), Settings(home=tmp_path), stop)
    threading.Timer(3, stop.set).start()
    assert session.run(None) == "the worker was asked to leave"
