"""Lines of a job's log on their way: how large one may be, how many of them, how often. Pure but for a lock."""

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
"""Characters of a line's text, of a traceback, of a field's value, of any name."""
MOST_FIELDS = 20
RATE_PER_S, BURST = 50.0, 200
"""Lines that a process may send per second, and at once."""
MOST_WAITING = 500
"""Lines that wait in a process whose broker is away."""
AT_ONCE = 100
REMARK_EVERY_S = 30.0
"""How often the same remark is made in a job's log."""
_NOT_FIELDS = frozenset({"event", "level", "timestamp", "exception", "job", "exc_info", "stack_info"})


@dataclass(frozen=True, slots=True)
class Writer:
    """Who writes: a worker's id, or one of `SERVICES`; the worker's name, or the host of the others."""

    worker: str
    name: str


def levels_from(level: Level) -> tuple[Level, ...]:
    """This level and those that are more important."""
    return LEVELS[LEVELS.index(level) :]


def line_of(event: Mapping[str, Any], writer: Writer, at_ms: int) -> str:
    """A log event, as structlog's processors see it, as the line that travels (JSON), with everything bounded."""
    fields = {_text(name, NAME_LENGTH): _bounded(value) for name, value in event.items() if name not in _NOT_FIELDS}
    data = dict(list(fields.items())[:MOST_FIELDS])
    if trace := event.get("exception"):
        data["exception"] = _text(ends_of(str(trace), TRACE_LENGTH), TRACE_LENGTH)
    line = {"at": at_ms, "level": level_of(event.get("level")), "worker": writer.worker, "name": writer.name}
    return json.dumps({**line, "text": _text(event.get("event", ""), TEXT_LENGTH), "data": data})


def level_of(name: object) -> Level:
    """A level by any name that loggers give it."""
    if name in LEVELS:
        return name
    return "error" if name in ("critical", "exception", "fatal") else "info"


def ends_of(text: str, length: int) -> str:
    """A text that is too long without its middle: a traceback says first where it began, and last what happened."""
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
    """Any value as a text of bounded length that every reader of JSON takes."""
    return str(value)[:length].encode("utf-8", "replace").decode()


class Budget:
    """Lets through `rate_per_s` on average, and `burst` at once."""

    def __init__(self, rate_per_s: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate_per_s, self._burst, self._clock = rate_per_s, burst, clock
        self._left, self._at = float(burst), clock()

    def spend(self) -> bool:
        """Whether one more may pass now."""
        now = self._clock()
        self._left = min(self._burst, self._left + max(0.0, now - self._at) * self._rate_per_s)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Seldom:
    """Lets one of each kind through every `every_s` seconds, and counts the others."""

    def __init__(self, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s, self._clock = every_s, clock
        self._told: dict[str, float] = {}
        self._held: Counter[str] = Counter()

    def passes(self, kind: str) -> int | None:
        """How many of this kind were held back since the last one that passed; None: this one is held back, too."""
        now = self._clock()
        if now - self._told.get(kind, -math.inf) < self._every_s:
            self._held[kind] += 1
            return None
        self._told[kind] = now
        return self._held.pop(kind, 0)

    def tell(self, say: Callable[..., Any], event: str, kind: str | None = None, **about: Any) -> None:
        """Log something seldom, and with it how often it was held back.

        Args:
            say: a method of a logger, such as `log.warning`.
            event: what it is told, which is also the kind, unless that is another.
            about: the fields of the line.
        """
        if (before := self.passes(kind or event)) is not None:
            say(event, **about, others_since_last_told=before)


@dataclass(frozen=True, slots=True)
class Batch:
    """Lines of one job, in their order, and how many before them were dropped."""

    job_id: str
    lines: tuple[str, ...]
    dropped: int = 0


class Backlog:
    """Lines that wait to be sent; any thread may put some.

    What is put too fast is dropped, and of too many the oldest; how many is told with the next batch of their job.
    """

    def __init__(self, budget: Budget, most: int = MOST_WAITING) -> None:
        self._budget, self._most = budget, most
        self._lines: deque[tuple[str, str]] = deque()
        self._dropped: Counter[str] = Counter()
        self._lock = threading.Lock()

    def put(self, job_id: str, line: str) -> None:
        """Let a line wait, if it may."""
        with self._lock:
            if not self._budget.spend():
                self._dropped[job_id] += 1
                return
            self._lines.append((job_id, line))
            self._drop_oldest()

    def take(self) -> Batch | None:
        """The oldest lines of one job, in the order in which they were put; None: nothing is to be told."""
        with self._lock:
            if not self._lines and not self._dropped:
                return None
            job_id = self._lines[0][0] if self._lines else next(iter(self._dropped))
            lines: list[str] = []
            while self._lines and self._lines[0][0] == job_id and len(lines) < AT_ONCE:
                lines.append(self._lines.popleft()[1])
            return Batch(job_id, tuple(lines), self._dropped.pop(job_id, 0))

    def give_back(self, batch: Batch) -> None:
        """Let a batch wait again that could not be sent."""
        with self._lock:
            self._lines.extendleft((batch.job_id, line) for line in reversed(batch.lines))
            if batch.dropped:
                self._dropped[batch.job_id] += batch.dropped
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        while len(self._lines) > self._most:
            self._dropped[self._lines.popleft()[0]] += 1


def called(worker: str, name: str) -> str:
    """What the writer of a line is called: a worker by its name, the others by what they do."""
    return worker if worker in SERVICES else name or worker


def fields_text(data: Mapping[str, Any], without: Iterable[str] = ("exception",)) -> str:
    """A line's fields in words, as people read them: `seconds=2.5 model=lenet5`."""
    return " ".join(f"{name}={_word(value)}" for name, value in data.items() if name not in without)


def _word(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return f'"{text}"' if " " in text or not text else text
