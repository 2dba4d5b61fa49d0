"""Sends a process's log lines about a job to that job's log, from a background thread.

A full or absent broker neither slows nor fails the process: a bounded backlog holds the lines and drops the oldest.
"""

import random
import threading
import time
import traceback
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import structlog
from redis import Redis
from redis.exceptions import RedisError

from computeshare.protocol.round_store import RoundStore
from computeshare.runtime.log_lines import BURST, RATE_PER_S, Backlog, Batch, Budget, Writer, line_of
from computeshare.transport.connections import connect

SEND_EVERY_S = 0.5
LONGEST_PAUSE_S = 5.0
PATIENCE_S = 2.0
"""Seconds that the end of a process waits for its last lines to be sent."""
log = structlog.get_logger()


class JobLog:
    """Context manager that sends log lines to the logs of jobs, over a thread and a connection of its own.

    Give structlog `capture` as a processor. An exception that ends the block becomes the last line.
    """

    def __init__(self, redis_url: str, writer: Writer, job_id: str = "") -> None:
        """`job_id`: the job of lines without a `job` field; if empty, such lines are not sent."""
        self._url, self._writer, self._job_id = redis_url, writer, job_id
        self._backlog = Backlog(Budget(RATE_PER_S, BURST))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="job-log", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            told = {"event": f"crashed: {type(error).__name__}: {error}", "level": "error"}
            self._put({**told, "exception": "".join(traceback.format_exception(error))})
        self._over.set()
        self._thread.join(PATIENCE_S)

    def capture(self, _logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        """A structlog processor: queues the event for sending and returns the event."""
        try:
            self._put(event)
        except Exception as error:  # a value whose text cannot be had, for one: nothing may fail for its log
            event["not_sent"] = type(error).__name__
        return event

    def _put(self, event: structlog.typing.EventDict) -> None:
        if job_id := str(event.get("job") or self._job_id):
            self._backlog.put(job_id, line_of(event, self._writer, _now_ms()))

    def _run(self) -> None:
        redis, pause_s, over = connect(self._url, retries=0), SEND_EVERY_S, False
        while not over:
            over = self._over.wait(random.uniform(0.5, 1) * pause_s)
            while batch := self._backlog.take():
                try:
                    self._send(redis, batch)
                    pause_s = SEND_EVERY_S
                except Exception:  # away, full, or no longer ours: what waits is bounded
                    self._backlog.give_back(batch)
                    pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
                    break
        redis.close()

    def _send(self, redis: Redis, batch: Batch) -> None:
        lines = list(batch.lines)
        if batch.dropped:
            event = {"event": f"{batch.dropped} lines were dropped here: too many at a time", "level": "warning"}
            lines.insert(0, line_of(event, self._writer, _now_ms()))
        RoundStore(redis, batch.job_id).log(lines)


def tell(redis: Redis, job_id: str, writer: Writer, **event: Any) -> None:
    """Write one line to a job's log at once; if the broker refuses the line, log a warning locally."""
    try:
        RoundStore(redis, job_id).log([line_of(event, writer, _now_ms())])
    except RedisError as error:
        log.warning("not in the job's log", job=job_id, error=str(error))


def log_warnings() -> None:
    """Route Python warnings to structlog."""

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object, **__: object
    ) -> None:
        log.warning(str(message), kind=category.__name__, where=f"{Path(filename).name}:{lineno}")

    warnings.showwarning = show


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
