"""A worker's display: one live line in a terminal, plain lines elsewhere."""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from computeshare.runtime.processes import configure_logging
from computeshare.terminal.output import plain, size
from computeshare.worker.seat.progress_pipe import SeatLink, SeatProgress, Speed, fetching

_STATES = {
    "loading": ("…", "yellow"),
    "waiting": ("▷", "cyan"),
    "working": ("▶", "green"),
    "scoring": ("◆", "green"),
}


class PlainFace:
    """The display without a terminal: each message is a line on standard error."""

    def say(self, text: str) -> None:
        """Print a message. Safe in a signal handler, even one that interrupts another print."""
        with contextlib.suppress(OSError, ValueError):  # nobody reads it
            os.write(sys.stderr.fileno(), f"{text}\n".encode())

    def close(self) -> None:
        """Does nothing: there is nothing to restore."""


class LiveFace:
    """A line that stays at the bottom of the terminal, below the log.

    Args:
        link: the link to the seat's process, which reports its progress.
        resting: returns why the worker rests; empty: it does not rest.
    """

    def __init__(self, screen: Console, link: SeatLink, resting: Callable[[], str]) -> None:
        self._link, self._resting = link, resting
        self._screen = screen
        self._said = ""
        self._closing = threading.Lock()
        self._live = Live(console=screen, refresh_per_second=4, transient=True, get_renderable=self._line)

    def __enter__(self) -> "LiveFace":
        self._live.start(refresh=True)
        self._link.echo = self._echo
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def say(self, text: str) -> None:
        """Show a message on the line from now on; the display's own thread draws it."""
        self._said = text

    def close(self) -> None:
        """Restore the terminal and leave the last message above the prompt. Only the first call, from any thread, does
        so.
        """
        if self._closing.acquire(blocking=False):
            with contextlib.suppress(OSError, ValueError):  # the terminal is gone
                self._live.stop()
                if self._said:
                    self._screen.print(Text(self._said))

    def _line(self) -> Text:
        return live_line(self._link.progress, self._link.speed(), self._resting(), self._said)

    def _echo(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._screen.print(Text(plain(text)), soft_wrap=True)


def live_line(progress: SeatProgress | None, speed: Speed, resting: str, said: str = "") -> Text:
    """A worker's activity in a line: its job, version, samples and bytes per second, or why it has no job. Pure.

    Args:
        progress: the seat's progress; None: there is no seat.
        resting: why the worker rests; empty: it does not rest.
        said: a message to show first.
    """
    line = Text(no_wrap=True, overflow="ellipsis", end="")
    if said:
        line.append(f"{plain(said)}  ", "bold yellow")
    if resting:
        line.append(f"‖ resting: {plain(resting)}  ", "yellow")
    if progress is None:
        return line if resting or said else line.append("○ waiting for a seat", "dim")
    icon, style = _STATES.get(progress.state, ("?", ""))
    line.append(f"{icon} ", style).append(plain(progress.title) or "a job", "bold")
    if progress.state == "loading":
        if progress.wanted:
            line.append(f"  {fetching(progress.fetched, progress.wanted)}", style)
            return line.append(f"  ↓ {size(round(speed.bytes_down))}/s", "dim")
        return line.append("  loading", style)
    if progress.state == "scoring":
        which = f"scoring version {progress.version:,} of {progress.rounds:,}"
        return line.append(f"  {which if progress.version else 'about to score versions'}")
    line.append(f"  version {progress.version:,} of {progress.rounds:,}  {speed.samples:,.0f} samples/s")
    return line.append(f"  ↑ {size(round(speed.bytes_up))}/s  ↓ {size(round(speed.bytes_down))}/s", "dim")


@contextmanager
def shown(link: SeatLink, resting: Callable[[], str]) -> Iterator[LiveFace | PlainFace]:
    """The display for the block: a live line if standard error is a terminal, else plain lines."""
    screen = Console(stderr=True, highlight=False)
    if not sys.stderr.isatty() or screen.is_dumb_terminal:
        yield PlainFace()
        return
    with LiveFace(screen, link, resting) as face:
        configure_logging()  # log lines go above the live line
        yield face
    configure_logging()
