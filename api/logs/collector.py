"""Moves the lines of all jobs' logs from Redis streams to SQLite, then trims the streams.

Repeating any step changes nothing: each read starts at the head of the stream, and a stored line is not stored again.
Lines come from workers, so nothing in them is trusted.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import structlog
from pydantic_core import from_json
from redis import Redis
from redis.exceptions import ResponseError
from sqlalchemy import select
from sqlalchemy.dialects.sqlite import insert

from api.database import Database
from api.projection.events.parser import LATEST_MS, Row
from api.projection.row_retention import LINES, thin_lines
from api.tables import JOB
from computeshare.protocol.keys import JobKeys
from computeshare.protocol.limits import LINE_BYTES
from computeshare.runtime.log_lines import (
    LEVELS,
    MOST_FIELDS,
    NAME_LENGTH,
    TEXT_LENGTH,
    TRACE_LENGTH,
    VALUE_LENGTH,
    ends_of,
    level_of,
)
from computeshare.types import plain

BATCH = 500
"""Lines taken from one job's stream at a time."""
THIN_EVERY = 2000
"""New lines of a job after which its oldest lines are thinned."""

RawLine = tuple[bytes, dict[bytes, bytes]]
log = structlog.get_logger()


class Collector:
    """The only consumer of the log streams."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._new: Counter[str] = Counter()

    def step(self, redis: Redis) -> int:
        """Store the lines that wait in the streams; returns their number."""
        job_ids = [row[0] for row in self._database.peek("SELECT id FROM job WHERE purged_ms IS NULL")]
        taken = _read(redis, job_ids)
        for job_id, raw in taken.items():
            self._take(job_id, raw)
        if taken:
            _trim(redis, taken)
        return sum(map(len, taken.values()))

    def _take(self, job_id: str, raw: Sequence[RawLine]) -> None:
        rows = _readable(job_id, raw)
        with self._database.writing() as connection:
            there = connection.execute(select(JOB.c.id).where(JOB.c.id == job_id)).one_or_none()
            if there is None or not rows:  # deleted meanwhile
                return
            connection.execute(insert(LINES).on_conflict_do_nothing(), rows)
            self._new[job_id] += len(rows)
            if self._new[job_id] >= THIN_EVERY:
                thin_lines(connection, job_id)
                del self._new[job_id]


def read_line(job_id: str, stream_id: bytes, fields: Mapping[bytes, bytes]) -> Row:
    """A stream entry as a row. Raises KeyError, TypeError or ValueError where the entry is malformed."""
    raw = fields[b"data"]
    if len(raw) > LINE_BYTES:
        raise ValueError("too large")
    line = from_json(raw)
    if not isinstance(line, dict):
        raise TypeError("the line is no object")
    at_ms, level = line.get("at"), line.get("level")
    if type(at_ms) is not int or not 0 <= at_ms < LATEST_MS:
        at_ms = min(int(stream_id.split(b"-")[0]), LATEST_MS - 1)
    return {
        "job_id": job_id,
        "stream_id": f"{stream_id.decode()}~{crc32(raw):08x}",
        "at_ms": at_ms,
        "worker": _clean(line.get("worker", ""), NAME_LENGTH),
        "name": _clean(line.get("name", ""), NAME_LENGTH),
        "level": level if level in LEVELS else level_of(level),
        "text": _clean(line["text"], TEXT_LENGTH),
        "data": _fields(line.get("data")),
    }


def _fields(data: object) -> Row:
    if not isinstance(data, dict):
        return {}
    found: Row = {_clean(name, NAME_LENGTH): _value(value) for name, value in list(data.items())[:MOST_FIELDS]}
    if "exception" in data:
        found["exception"] = _clean(ends_of(str(data["exception"]), TRACE_LENGTH), TRACE_LENGTH)
    return found


def _value(value: object) -> str | int | float | bool | None:
    if value is None or isinstance(value, bool) or (isinstance(value, int | float) and abs(value) < 2**53):
        return value  # numbers that JSON and browsers represent exactly
    return _clean(value, VALUE_LENGTH)


def _clean(value: object, length: int) -> str:
    """Any value as printable text of at most `length` characters."""
    return plain(str(value)[:length], lines=True)


def _readable(job_id: str, raw: Sequence[RawLine]) -> list[Row]:
    rows, wrong = [], []
    for stream_id, fields in raw:
        try:
            rows.append(read_line(job_id, stream_id, fields))
        except Exception as error:  # a damaged or hostile line may make the parser raise anything
            wrong.append(repr(error)[:200])
    if wrong:
        log.warning("lines passed over", job=job_id, lines=len(wrong), error=wrong[0])
    return rows


def _read(redis: Redis, job_ids: Sequence[str]) -> dict[str, list[RawLine]]:
    """Up to `BATCH` entries of each job's stream. A key of another type is deleted."""
    pipeline = redis.pipeline(transaction=False)
    for job_id in job_ids:
        pipeline.xrange(JobKeys(job_id).logs(), count=BATCH)
    replies: Any = pipeline.execute(raise_on_error=False)
    taken = {}
    for job_id, reply in zip(job_ids, replies, strict=True):
        if isinstance(reply, ResponseError) and "WRONGTYPE" in str(reply):
            redis.unlink(JobKeys(job_id).logs())
        elif isinstance(reply, Exception):
            raise reply
        elif reply:
            taken[job_id] = reply
    return taken


def _trim(redis: Redis, taken: Mapping[str, Sequence[RawLine]]) -> None:
    """Delete the stored entries from the streams."""
    pipeline = redis.pipeline(transaction=False)
    for job_id, raw in taken.items():
        pipeline.xdel(JobKeys(job_id).logs(), *(stream_id for stream_id, _ in raw))
    pipeline.execute()
