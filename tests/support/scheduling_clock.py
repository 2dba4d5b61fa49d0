"""What tests of the dispatcher need: its clock, workers as they register, seats as SQLite and RQ have them."""

import secrets
from collections.abc import Callable
from typing import Any

from redis import Redis
from sqlalchemy import select

from api.database import Database
from api.publication.outbox import SEAT
from computeshare.queue import WorkerInfo, register


class Clock:
    """The control plane's clock, moved by the test."""

    def __init__(self, start_ms: int) -> None:
        self.ms = start_ms

    def __call__(self) -> int:
        return self.ms


def online(redis: Redis, queue: str, seat: str | None = None, worker: str | None = None, **more: Any) -> str:
    worker = worker or secrets.token_hex(6)
    register(redis, WorkerInfo(worker, f"mac-{worker}", "cpu", (queue,), {}, 1, "host", 1, seat, **more))
    return worker


def seats(database: Database, *states: str) -> list[Any]:
    with database.engine.connect() as connection:
        rows = connection.execute(select(SEAT).order_by(SEAT.c.created_ms, SEAT.c.number)).all()
    return [row for row in rows if not states or row.state in states]


def queued(redis: Redis, worker: str) -> list[str]:
    entries: Any = redis.lrange(f"rq:queue:{worker}", 0, -1)
    return [entry.decode() for entry in entries]


def set_rq_status(redis: Redis, seat_id: str, status: str) -> None:
    redis.hset(f"rq:job:{seat_id}", "status", status)


class Killed(Exception):
    """Stands for SIGKILL: nothing after it runs."""


def dying(function: Callable[..., Any], after: bool) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        if after:
            function(*arguments, **named)
        raise Killed

    return call
