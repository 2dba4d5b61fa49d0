"""Lines of a job's log before they are sent: limits on their size, number and rate. Pure, except for a lock."""

import json
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Level = Literal["debug", "info", "warning", "error"]
LEVELS: tuple[Level, ...] = ("debug", "info", "warning", "error")
"""From the least to the most important."""
SERVICES = ("reducer", "evaluator")
TEXT_LENGTH, TRACE_LENGTH, VALUE_LENGTH, NAME_LENGTH = 2000, 4000, 500, 100
"""The most characters of a line's text, a traceback, a field's value, and a name."""
MOST_FIELDS = 20
RATE_PER_S, BURST = 50.0, 200
"""Lines that a process may send per second on average, and in a burst."""
MOST_WAITING = 500
"""The most lines that wait in a process while the broker is away."""
AT_ONCE = 100
REMARK_EVERY_S = 30.0
"""Seconds between repetitions of the same remark in a job's log."""
_NOT_FIELDS = frozenset({"event", "level", "timestamp", "exception", "job", "exc_info", "stack_info"})


@dataclass(frozen=True, slots=True)
class Writer:
    """The writer of log lines: `worker` is a worker's id or one of `SERVICES`, `name` the worker's name or the host."""

    worker: str
    name: str


def levels_from(level: Level) -> tuple[Level, ...]:
    """This level and all more important levels."""
    return LEVELS[LEVELS.index(level) :]


def line_of(event: Mapping[str, Any], writer: Writer, at_ms: int) -> str:
    """The JSON line for a structlog event, with all texts and fields bounded."""
    fields = {_text(name, NAME_LENGTH): _bounded(value) for name, value in event.items() if name not in _NOT_FIELDS}
    data = dict(list(fields.items())[:MOST_FIELDS])
    if trace := event.get("exception"):
        data["exception"] = _text(ends_of(str(trace), TRACE_LENGTH), TRACE_LENGTH)
    line = {"at": at_ms, "level": level_of(event.get("level")), "worker": writer.worker, "name": writer.name}
    return json.dumps({**line, "text": _text(event.get("event", ""), TEXT_LENGTH), "data": data})


def level_of(name: object) -> Level:
    """The level for any name that loggers use; `info` for an unknown name."""
    if name in LEVELS:
        return name
    return "error" if name in ("critical", "exception", "fatal") else "info"


def ends_of(text: str, length: int) -> str:
    """A text cut to `length` by dropping its middle: the start and the end of a traceback matter most."""
    first = length // 4
    return text if len(text) <= length else f"{text[:first]}…{text[first + 1 - length :]}"


def _bounded(value: object) -> str | int | float | bool | None:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) < 2**53:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    return _text(value, VALUE_LENGTH)


def _text(value: object, length: int) -> str:
    """Any value as text of at most `length` characters, without lone surrogates, which JSON readers may refuse."""
    return str(value)[:length].encode("utf-8", "replace").decode()


class Budget:
    """A token bucket: `rate_per_s` tokens per second on average, at most `burst` at once."""

    def __init__(self, rate_per_s: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate_per_s, self._burst, self._clock = rate_per_s, burst, clock
        self._left, self._at = float(burst), clock()

    def spend(self) -> bool:
        """Take a token; False if there is none."""
        now = self._clock()
        self._left = min(self._burst, self._left + max(0.0, now - self._at) * self._rate_per_s)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Seldom:
    """Rate limit by kind: passes one event of each kind every `every_s` seconds, and counts the others."""

    def __init__(self, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s, self._clock = every_s, clock
        self._told: dict[str, float] = {}
        self._held: Counter[str] = Counter()

    def passes(self, kind: str) -> int | None:
        """The number of events of this kind held back since the last that passed; None to hold this event back too."""
        now = self._clock()
        if now - self._told.get(kind, -math.inf) < self._every_s:
            self._held[kind] += 1
            return None
        self._told[kind] = now
        return self._held.pop(kind, 0)

    def tell(self, say: Callable[..., Any], event: str, kind: str | None = None, **about: Any) -> None:
        """Log an event unless it is held back, with the number of events held back before.

        Args:
            say: a method of a logger, such as `log.warning`.
            event: the logged text, also the kind by default.
            about: the fields of the line.
        """
        if (before := self.passes(kind or event)) is not None:
            say(event, **about, others_since_last_told=before)


@dataclass(frozen=True, slots=True)
class Batch:
    """Lines of one job in order, and the number of lines dropped before them."""

    job_id: str
    lines: tuple[str, ...]
    dropped: int = 0


class Backlog:
    """Lines that wait to be sent; any thread may add lines.

    Lines above the budget are dropped, and the oldest lines above `most`; the job's next batch tells how many.
    """

    def __init__(self, budget: Budget, most: int = MOST_WAITING) -> None:
        self._budget, self._most = budget, most
        self._lines: deque[tuple[str, str]] = deque()
        self._dropped: Counter[str] = Counter()
        self._lock = threading.Lock()

    def put(self, job_id: str, line: str) -> None:
        """Add a line, if the budget allows."""
        with self._lock:
            if not self._budget.spend():
                self._dropped[job_id] += 1
                return
            self._lines.append((job_id, line))
            self._drop_oldest()

    def take(self) -> Batch | None:
        """Remove and return the oldest lines of one job, in order; None if there is nothing to send."""
        with self._lock:
            if not self._lines and not self._dropped:
                return None
            job_id = self._lines[0][0] if self._lines else next(iter(self._dropped))
            lines: list[str] = []
            while self._lines and self._lines[0][0] == job_id and len(lines) < AT_ONCE:
                lines.append(self._lines.popleft()[1])
            return Batch(job_id, tuple(lines), self._dropped.pop(job_id, 0))

    def give_back(self, batch: Batch) -> None:
        """Put a batch that could not be sent back at the front."""
        with self._lock:
            self._lines.extendleft((batch.job_id, line) for line in reversed(batch.lines))
            if batch.dropped:
                self._dropped[batch.job_id] += batch.dropped
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        while len(self._lines) > self._most:
            self._dropped[self._lines.popleft()[0]] += 1


def called(worker: str, name: str) -> str:
    """The display name of a line's writer: a worker's name, or `reducer` or `evaluator`."""
    return worker if worker in SERVICES else name or worker


def fields_text(data: Mapping[str, Any], without: Iterable[str] = ("exception",)) -> str:
    """A line's fields as readable text: `seconds=2.5 model=lenet5`."""
    return " ".join(f"{name}={_word(value)}" for name, value in data.items() if name not in without)


def _word(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return f'"{text}"' if " " in text or not text else text
