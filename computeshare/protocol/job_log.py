"""What a process logs about a job, on its way into that job's log, beside whatever the process does.

A broker that is full or away neither slows nor fails anything: lines wait for it, the oldest give way.
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
"""How long the end of a process waits for its last lines to be sent."""
log = structlog.get_logger()


class JobLog:
    """Sends lines to the logs of jobs from a thread and a connection of their own, until the end of its block.

    `capture` is the processor that structlog is to have. An error that ends the block is the last line.
    """

    def __init__(self, redis_url: str, writer: Writer, job_id: str = "") -> None:
        """`job_id`: the job that lines are about which do not name one as `job`; empty: those are not sent."""
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
        """A structlog processor: takes note of the event, and leaves it as it is."""
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
    """Put a single line into a job's log at once, if the broker takes it."""
    try:
        RoundStore(redis, job_id).log([line_of(event, writer, _now_ms())])
    except RedisError as error:
        log.warning("not in the job's log", job=job_id, error=str(error))


def log_warnings() -> None:
    """Have the warnings of libraries logged as everything else is."""

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object, **__: object
    ) -> None:
        log.warning(str(message), kind=category.__name__, where=f"{Path(filename).name}:{lineno}")

    warnings.showwarning = show


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
