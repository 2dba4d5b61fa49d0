"""A seat's process tells its worker how it gets on: small lines of JSON down a pipe, dropped where nobody reads."""

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
"""Variable that names the pipe's end to the seat's process."""
EVERY_S = 0.5
LONGEST = 500
"""Bytes of a line: a pipe takes so many in one piece or not at all, on every system."""
LONGEST_TITLE = 60
WINDOW_S = 8.0
"""Over how long speeds are taken."""
_LONGEST_WORDS = 8192


@dataclass(frozen=True, slots=True)
class SeatProgress:
    """How a seat gets on: bytes and samples since it began."""

    state: str
    """`loading`, `waiting` or `working`."""
    title: str = ""
    version: int = 0
    rounds: int = 0
    samples: int = 0
    bytes_up: int = 0
    bytes_down: int = 0

    def encode(self) -> bytes:
        """One line, `LONGEST` bytes at most."""
        title = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in self.title[:LONGEST_TITLE])
        return json.dumps(asdict(self) | {"title": title}, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> "SeatProgress | None":
        """What a line says; None if that is nothing."""
        try:
            values = json.loads(line)
            numbers = [int(values[name]) for name in ("version", "rounds", "samples", "bytes_up", "bytes_down")]
            return cls(str(values["state"])[:20], str(values["title"])[:LONGEST_TITLE], *numbers)
        except (ValueError, KeyError, TypeError):
            return None


@dataclass(frozen=True, slots=True)
class Speed:
    """Per second, over the last few seconds."""

    samples: float = 0.0
    bytes_up: float = 0.0
    bytes_down: float = 0.0


class Teller:
    """The seat's side: tells twice a second what `look` finds, and at once when asked to; never waits.

    Does nothing in a process that no worker listens to.
    """

    def __init__(self, look: Callable[[], SeatProgress]) -> None:
        self._look = look
        self._descriptor = int(os.environ.pop(DESCRIPTOR, "-1"))
        if self._descriptor >= 0:
            os.set_inheritable(self._descriptor, False)
            os.set_blocking(self._descriptor, False)
            threading.Thread(target=self._keep, name="telling", daemon=True).start()

    def tell(self) -> None:
        """Tell it now, if there is room for it."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):  # full, or the worker is gone, of which others take note
                os.write(self._descriptor, self._look().encode())

    def _keep(self) -> None:
        tick = threading.Event()
        while not tick.wait(EVERY_S):
            self.tell()


class SeatLink:
    """The worker's side: what its seat told last, and how fast it is.

    `echo`, where it is set, takes what the seat's process prints, line by line; else that goes where the worker's does.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.progress: SeatProgress | None = None
        self.echo: Callable[[str], None] | None = None
        self._clock = clock
        self._heard: deque[tuple[float, SeatProgress]] = deque(maxlen=64)
        self._seat = 0  # grows with each: what one told last may be read after it has ended

    @property
    def is_loading(self) -> bool:
        """Whether the seat has not come to its job yet."""
        return self.progress is None or self.progress.state == "loading"

    def hear(self, progress: SeatProgress) -> None:
        """Take note of what was told."""
        self._heard.append((self._clock(), progress))
        self.progress = progress

    def speed(self) -> Speed:
        """How fast the seat is, by what it told in the last `WINDOW_S` seconds."""
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
        """Variables and file actions for the process that is started within the block."""
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
        """The seat's process has ended."""
        self._seat += 1
        self.progress = None
        self._heard.clear()

    def _hear_line(self, seat: int, line: bytes) -> None:
        if seat == self._seat and (progress := SeatProgress.decode(line)):
            self.hear(progress)


def _read(descriptor: int, take: Callable[[bytes], None]) -> None:
    """Hand on line by line until the other side is gone."""
    with open(descriptor, "rb") as lines:
        while line := lines.readline(_LONGEST_WORDS):
            take(line)
