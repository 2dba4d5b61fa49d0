"""Delivers the outbox: carries out decisions stored in SQLite, in the broker and on disk, in order.

Every delivery may be repeated: the process may die between carrying a decision out and recording it as done.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog
from redis import Redis
from redis.exceptions import ResponseError
from sqlalchemy import Connection, delete, select, update

from api.database import Database, now_ms
from api.stored_specs import spec_of
from api.tables import ACTIVE, JOB, WORKER, Event, IdempotencyKey, Outbox, Recipe, SeatRow, table
from computeshare.checkpoints.store import Artifacts
from computeshare.errors import DamagedRound
from computeshare.jobspec.tasks.recipes import PACKAGE
from computeshare.protocol.keys import JobKeys
from computeshare.protocol.round_store import RoundStore
from computeshare.queue import Seat, SeatQueue, recipes
from computeshare.runtime.failpoints import failpoint
from computeshare.runtime.signatures import SigningKey
from computeshare.tasks.recipes.bundle import Bundle, of_package
from computeshare.types import ENDED

OUTBOX, SEAT, RECIPE, EVENT = table(Outbox), table(SeatRow), table(Recipe), table(Event)
POSTPONED_MS = 5000
KEPT_MS = 24 * 3600 * 1000
"""How long delivered rows of the outbox, and idempotency keys, are kept."""

log = structlog.get_logger()


class Courier:
    """Delivers the outbox; seats and recipes are signed by `key`."""

    def __init__(self, database: Database, artifacts_dir: Path, key: SigningKey | None = None) -> None:
        self._database = database
        self._artifacts_dir, self._key = artifacts_dir, key
        self._kinds: dict[str, Callable[[Redis, str, dict[str, Any]], None]] = {
            "seat": self._seat,
            "stop": self._stop,
            "vacate": self._vacate,
            "pause": self._change,
            "resume": self._change,
            "unban": self._unban,
            "end": self._end,
            "retry": self._retry,
            "purge": self._purge,
        }

    def deliver(self, redis: Redis) -> dict[str, str]:
        """Deliver the due rows; returns the broker's error by job where it refused a row, which is tried again."""
        refused = {}
        with self._database.engine.connect() as connection:
            due = (OUTBOX.c.done_ms.is_(None)) & (OUTBOX.c.due_ms <= now_ms())
            rows = connection.execute(select(OUTBOX).where(due).order_by(OUTBOX.c.id)).all()
        for row in rows:
            failpoint("before_delivery")
            try:
                self._kinds[row.kind](redis, row.job_id, row.payload)
            except ResponseError as error:  # for example out of memory; the other rows need not wait
                log.warning("the broker refused", job=row.job_id, what=row.kind, error=str(error))
                refused[row.job_id] = str(error)
                self._note(row.id, {"due_ms": now_ms() + POSTPONED_MS})
                continue
            failpoint("after_delivery")
            self._note(row.id, {"done_ms": now_ms()}, row.payload["seat"] if row.kind == "seat" else None)
        return refused

    def _note(self, row_id: int, values: dict[str, int], issued: str | None = None) -> None:
        with self._database.writing() as connection:
            connection.execute(update(OUTBOX).where(OUTBOX.c.id == row_id).values(values))
            if issued:
                mine = (SEAT.c.id == issued) & (SEAT.c.state == "pending")
                connection.execute(update(SEAT).where(mine).values(state="issued"))

    def tidy(self) -> None:
        """Delete delivered rows and idempotency keys that are older than `KEPT_MS`."""
        before = now_ms() - KEPT_MS
        keys = table(IdempotencyKey)
        with self._database.writing() as connection:
            connection.execute(delete(OUTBOX).where(OUTBOX.c.done_ms < before))
            connection.execute(delete(keys).where(keys.c.created_ms < before))

    def publish(self, redis: Redis, job_id: str) -> None:
        """Write an active job's bans, spec, creator and recipe to the broker, where workers and reducers find them."""
        with self._database.engine.connect() as connection:
            columns = (JOB.c.spec, JOB.c.status, JOB.c.forked_from)
            row = connection.execute(select(*columns).where(JOB.c.id == job_id)).one_or_none()
            bans, creator = _bans(connection, job_id), _creator(connection, job_id)
            recipe = _recipe(connection, row.spec) if row else None
        if row and row.status in ACTIVE:
            if bans:  # before anyone can join: the broker may have lost them
                redis.hset(JobKeys(job_id).banned(), mapping=bans)
            if recipe:  # also before: a seat asks for it
                recipes.publish(redis, job_id, spec_of(row.spec), Bundle.parse(recipe), self._key)
            origin = row.forked_from["token"] if row.forked_from else ""
            RoundStore(redis, job_id).publish(json.dumps(row.spec), origin, creator)

    def align(self, redis: Redis, job_id: str) -> None:
        """Pause or resume a job's rounds by its status in SQLite now: a user may have changed it meanwhile."""
        status, rounds = self._status(job_id), RoundStore(redis, job_id)
        if status == "paused":
            rounds.pause()
        elif status in ACTIVE:
            rounds.resume()

    def _status(self, job_id: str) -> str | None:
        """The job's status in SQLite; None if the job was deleted."""
        with self._database.engine.connect() as connection:
            status: str | None = connection.scalar(select(JOB.c.status).where(JOB.c.id == job_id))
        return status

    def _change(self, redis: Redis, job_id: str, payload: dict[str, Any]) -> None:
        self.align(redis, job_id)

    def _seat(self, redis: Redis, job_id: str, payload: dict[str, Any]) -> None:
        with self._database.engine.connect() as connection:
            if not _wanted(connection, payload["seat"]):
                return  # closed meanwhile
        SeatQueue(redis, self._key).enqueue(Seat.parse(payload["seat"]))

    def _stop(self, redis: Redis, job_id: str, payload: dict[str, Any]) -> None:
        seats, seat = SeatQueue(redis), Seat.parse(payload["seat"])
        queued = seats.state([seat])[seat.id] == "queued"
        seats.stop(seat)
        if queued:
            seats.forget(seat)
        seats.vacate(seat)

    def _vacate(self, redis: Redis, job_id: str, payload: dict[str, Any]) -> None:
        SeatQueue(redis).vacate(Seat.parse(payload["seat"]))

    def _unban(self, redis: Redis, job_id: str, payload: dict[str, Any]) -> None:
        with self._database.engine.connect() as connection:
            if payload["worker"] in _bans(connection, job_id):
                return  # banned again by now
        RoundStore(redis, job_id).lift_ban(payload["worker"])

    def _end(self, redis: Redis, job_id: str, payload: dict[str, Any]) -> None:
        if self._status(job_id) in (None, *ENDED):  # else it is tried again by now
            RoundStore(redis, job_id).end(payload["status"])

    def _retry(self, redis: Redis, job_id: str, payload: dict[str, Any]) -> None:
        """Drop the keys of the failed rounds, so that a reducer opens the job from its last checkpoint."""
        rounds = RoundStore(redis, job_id)
        if self._status(job_id) in (None, *ENDED):
            return
        try:
            state = rounds.read()
        except DamagedRound:
            state = None
        if state is None or state.token.incarnation <= payload["incarnation"]:  # else this was done already
            rounds.reset()

    def _purge(self, redis: Redis, job_id: str, payload: dict[str, Any]) -> None:
        """Remove every trace of a deleted job."""
        RoundStore(redis, job_id).end("cancelled")
        for seat in payload.get("seats", []):
            SeatQueue(redis).stop(Seat.parse(seat))
        RoundStore(redis, job_id).purge()
        Artifacts(self._artifacts_dir, job_id).delete()


def _bans(connection: Connection, job_id: str) -> dict[Any, Any]:
    """The reasons for a job's bans, by worker id."""
    query = select(WORKER.c.worker, WORKER.c.banned).where(WORKER.c.job_id == job_id, WORKER.c.banned.is_not(None))
    return {row.worker: row.banned for row in connection.execute(query)}


def _creator(connection: Connection, job_id: str) -> str:
    """The name of whoever created a job; empty: it is not known."""
    found: Any = connection.scalar(select(EVENT.c.data).where(EVENT.c.job_id == job_id, EVENT.c.type == "created"))
    return str((found or {}).get("by", ""))


def _recipe(connection: Connection, spec: dict[str, Any]) -> bytes | None:
    """The content of the recipe that a specification names, if it names one."""
    name = spec.get("recipe") or ""
    if name.startswith(PACKAGE):
        return of_package(name).content
    query = select(RECIPE.c.content).where(RECIPE.c.digest == name)
    content: bytes | None = connection.scalar(query)
    return content


def _wanted(connection: Connection, seat_id: str) -> bool:
    """Whether a seat is still open and its job still active."""
    query = select(SEAT.c.id).join(JOB, JOB.c.id == SEAT.c.job_id)
    query = query.where(SEAT.c.id == seat_id, SEAT.c.ended_ms.is_(None), JOB.c.status.in_(ACTIVE))
    return connection.execute(query).one_or_none() is not None
