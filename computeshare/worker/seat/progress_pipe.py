"""A seat's progress, sent to its worker process as short JSON lines through a pipe; dropped if the pipe is full."""

import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

DESCRIPTOR = "COMPUTESHARE_TELL"
"""Environment variable with the file descriptor of the seat's end of the pipe."""
EVERY_S = 0.5
LONGEST = 500
"""Most bytes in a line: on every system a pipe takes this many atomically."""
LONGEST_TITLE = 40
WINDOW_S = 8.0
"""Seconds over which speeds are averaged."""
_LONGEST_WORDS = 8192


@dataclass(frozen=True, slots=True)
class SeatProgress:
    """A seat's progress; bytes and samples count from its start."""

    state: str
    """`loading`, `waiting`, `working` or `scoring`."""
    title: str = ""
    version: int = 0
    rounds: int = 0
    samples: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    fetched: int = 0
    wanted: int = 0
    """Bytes of the files that the job needs, while the seat fetches them; `fetched` of them are here."""
    units: tuple[int, ...] = ()
    """The units that each device has computed."""
    stopped: tuple[int, ...] = ()
    """The places of devices that failed."""

    def encode(self) -> bytes:
        """Encode as one line of JSON, at most `LONGEST` bytes."""
        title = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in self.title[:LONGEST_TITLE])
        return json.dumps(asdict(self) | {"title": title}, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> "SeatProgress | None":
        """Decode a line; None if it is invalid."""
        try:
            values = json.loads(line)
            numbers = {name: int(values[name]) for name in _NUMBERS}
            units, stopped = (tuple(int(one) for one in values[name]) for name in _LISTS)
            state, title = str(values["state"])[:20], str(values["title"])[:LONGEST_TITLE]
            return cls(state, title, units=units, stopped=stopped, **numbers)
        except (ValueError, KeyError, TypeError):
            return None


_NUMBERS = ("version", "rounds", "samples", "bytes_up", "bytes_down", "fetched", "wanted")
_LISTS = ("units", "stopped")


def fetching(done_bytes: int, total_bytes: int) -> str:
    """How far a seat is with the files that its job needs, in words."""
    unit, name = (1e6, "MB") if total_bytes >= 1e6 else (1e3, "kB")
    return f"fetching data: {done_bytes / unit:,.0f} of {total_bytes / unit:,.0f} {name}"


@dataclass(frozen=True, slots=True)
class Speed:
    """Samples and bytes per second, averaged over the last `WINDOW_S` seconds."""

    samples: float = 0.0
    bytes_up: float = 0.0
    bytes_down: float = 0.0


class Teller:
    """The seat's end of the pipe: sends `look()` twice a second and on `tell`, without ever blocking.

    Does nothing in a process without a listening worker.
    """

    def __init__(self, look: Callable[[], SeatProgress]) -> None:
        self._look = look
        self._descriptor = int(os.environ.pop(DESCRIPTOR, "-1"))
        if self._descriptor >= 0:
            os.set_inheritable(self._descriptor, False)
            os.set_blocking(self._descriptor, False)
            threading.Thread(target=self._keep, name="telling", daemon=True).start()

    def tell(self) -> None:
        """Send the progress now, if the pipe has room."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):  # the pipe is full, or the worker is gone, which is noticed elsewhere
                os.write(self._descriptor, self._look().encode())

    def _keep(self) -> None:
        tick = threading.Event()
        while not tick.wait(EVERY_S):
            self.tell()


class SeatLink:
    """The worker's end of the pipe: the seat's latest progress, and its speed.

    `echo`, if set, is called with each line that the seat's process prints; else the seat shares the worker's output.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.progress: SeatProgress | None = None
        self.echo: Callable[[str], None] | None = None
        self._clock = clock
        self._heard: deque[tuple[float, SeatProgress]] = deque(maxlen=64)
        self._seat = 0  # number of the current seat: a late line of an earlier seat is ignored
        self._moved_before = (0, 0)

    @property
    def is_loading(self) -> bool:
        """Whether the seat is still loading, or has not reported yet."""
        return self.progress is None or self.progress.state == "loading"

    @property
    def moved(self) -> tuple[int, int]:
        """Bytes that all seats so far have sent and received, by their last reports."""
        up, down = self._moved_before
        now = self.progress
        return (up + now.bytes_up, down + now.bytes_down) if now else (up, down)

    def hear(self, progress: SeatProgress) -> None:
        """Record a report."""
        self._heard.append((self._clock(), progress))
        self.progress = progress

    def speed(self) -> Speed:
        """The seat's speed, from its reports of the last `WINDOW_S` seconds."""
        now = self._clock()
        recent = [(at, progress) for at, progress in list(self._heard) if now - at <= WINDOW_S]
        if len(recent) < 2 or recent[-1][0] <= recent[0][0]:
            return Speed()
        (begun, first), (ended, last) = recent[0], recent[-1]
        s = ended - begun
        up, down = last.bytes_up - first.bytes_up, last.bytes_down - first.bytes_down
        return Speed((last.samples - first.samples) / s, up / s, down / s)

    @contextmanager
    def ends(self) -> Iterator[tuple[dict[str, str], list[Any]]]:
        """Environment variables and `posix_spawn` file actions for the process that is started within the block."""
        self.over()
        seat = self._seat
        reading, writing = os.pipe()
        os.set_inheritable(writing, True)
        hear: Callable[[bytes], None] = lambda line: self._hear_line(seat, line)  # noqa: E731
        ours, theirs, actions = [(reading, hear)], [writing], []
        if echo := self.echo:
            words_in, words_out = os.pipe()
            ours.append((words_in, lambda line: echo(line.decode(errors="replace").rstrip("\n"))))
            theirs.append(words_out)
            actions = [(os.POSIX_SPAWN_DUP2, words_out, number) for number in (1, 2)]
        try:
            yield {DESCRIPTOR: str(writing)}, actions
        finally:
            for descriptor in theirs:
                os.close(descriptor)
            for descriptor, take in ours:
                threading.Thread(target=_read, args=(descriptor, take), name="listening", daemon=True).start()

    def over(self) -> None:
        """Forget the seat, whose process has ended."""
        self._seat += 1
        self._moved_before, self.progress = self.moved, None
        self._heard.clear()

    def _hear_line(self, seat: int, line: bytes) -> None:
        if seat == self._seat and (progress := SeatProgress.decode(line)):
            self.hear(progress)


def _read(descriptor: int, take: Callable[[bytes], None]) -> None:
    """Pass on each line until the other end is closed."""
    with open(descriptor, "rb") as lines:
        while line := lines.readline(_LONGEST_WORDS):
            take(line)
