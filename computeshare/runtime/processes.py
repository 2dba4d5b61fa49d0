"""Manners of a process: end with the one that started it, end when asked."""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType

import structlog

PARENT = "COMPUTESHARE_PARENT"
"""Variable in which a process tells the one it starts its own id."""
SOCKETS = "COMPUTESHARE_SOCKETS"
"""Variable in which `computeshare up` tells its fork server the temporary folder that holds their sockets."""
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of <malloc.h>
_LARGEST_KEPT = 1 << 30


def exit_with_parent(every_s: float = 0.5) -> None:
    """End this process soon after its parent, however that one died (SIGKILL leaves no other trace).

    The parent is the one at the time of the call, and for a process of multiprocessing the one that asked for it too:
    a fork server outlives that one for as long as it has children.
    """
    # By the time this runs the parent may be gone already, so it leaves its number.
    parent, starter = int(os.environ.pop(PARENT, os.getppid())), multiprocessing.parent_process()

    def watch() -> None:
        tick = threading.Event()
        while os.getppid() == parent and (starter is None or starter.is_alive()):
            tick.wait(every_s)
        os._exit(70)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def keep_freed_memory() -> None:
    """Have this process keep the memory it frees for what it needs next, where its C library is glibc.

    A round takes and frees vectors of the model's size again and again; by default glibc returns them to the system,
    and fresh pages cost more than what is written into them.
    """
    try:
        tune = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    if not tune(_MMAP_THRESHOLD, _LARGEST_KEPT):
        tune(_MMAP_THRESHOLD, 32 << 20)  # the most that glibc takes, if it is not a new one
    tune(_TRIM_THRESHOLD, _LARGEST_KEPT)


def return_freed_memory() -> None:
    """Give back what lies free between what is kept, where the C library is glibc: worth its while after a model was
    built, of which only its weights are kept.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def spare_the_collector() -> None:
    """Take all that has been made so far, modules above all, out of what the garbage collector looks through."""
    gc.collect()
    gc.freeze()


def when_asked_to_end(handle: Callable[[int, FrameType | None], None]) -> None:
    """Have SIGTERM, SIGINT and SIGHUP handled, the last one unless it is ignored, as under nohup."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handle)


def stop_event() -> threading.Event:
    """An event that SIGTERM, SIGINT and SIGHUP set; a second signal ends the process at once."""
    stop = threading.Event()

    def handle(signum: int, frame: object) -> None:
        if stop.is_set():
            os._exit(128 + signum)
        stop.set()

    when_asked_to_end(handle)
    return stop


def end_soon_after(
    stop: threading.Event,
    busy: Callable[[], bool] = lambda: False,
    patience_s: float = 1.5,
    last: Callable[[], None] | None = None,
    code: Callable[[], int] = lambda: 0,
) -> None:
    """End this process soon after `stop` is set, even where it hangs in a call to a broker that is away.

    While it is `busy` with something that should be finished, it is waited for; `last` is called right before the end,
    then `code` for the exit code.
    """

    def watch() -> None:
        stop.wait()
        tick = threading.Event()
        tick.wait(patience_s)
        while busy():
            tick.wait(0.1)
        if last:
            last()
        os._exit(code())

    threading.Thread(target=watch, name="end-watch", daemon=True).start()


def configure_logging(*also: structlog.typing.Processor) -> None:
    """Plain log lines on standard error: time, level, event, fields; `also` see them before they become text."""
    import logging
    import sys

    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S"),
            structlog.processors.format_exc_info,
            *also,
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def hostname() -> str:
    return socket.gethostname()


def worker_name() -> str:
    """What the pages call this worker: the name it was given, else its machine's."""
    return os.environ.get("COMPUTESHARE_NAME") or hostname()
