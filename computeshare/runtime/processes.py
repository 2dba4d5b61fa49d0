"""The life of a process: end with its parent, end on signals; memory, logging and names."""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import structlog

PARENT = "COMPUTESHARE_PARENT"
"""Environment variable in which a process passes its own id to a child."""
SOCKETS = "COMPUTESHARE_SOCKETS"
"""Environment variable in which `computeshare up` passes the temporary folder of their sockets to its fork server."""
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of <malloc.h>
_LARGEST_KEPT = 1 << 30


def exit_with_parent(every_s: float = 0.5) -> None:
    """End this process soon after its parent has ended in any way, even by SIGKILL.

    The parent is the process named in `COMPUTESHARE_PARENT`, else the parent at the time of the call. A process of
    multiprocessing also ends with the process that requested it: a fork server outlives that process while it has
    children.
    """
    # The parent may be gone by now, so it leaves its process id in the environment.
    parent, starter = int(os.environ.pop(PARENT, os.getppid())), multiprocessing.parent_process()

    def watch() -> None:
        tick = threading.Event()
        while os.getppid() == parent and (starter is None or starter.is_alive()):
            tick.wait(every_s)
        os._exit(70)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


@contextlib.contextmanager
def using_threads(count: int) -> Iterator[None]:
    """Set the number of CPU threads that torch uses in this thread within the block: sums' last bits depend on it."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def keep_freed_memory() -> None:
    """Let this process keep freed memory for its next allocations, if its C library is glibc.

    Each round allocates and frees vectors of the model's size; by default glibc returns them to the system, and page
    faults on fresh pages cost more than the writes.
    """
    try:
        tune = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    if not tune(_MMAP_THRESHOLD, _LARGEST_KEPT):
        tune(_MMAP_THRESHOLD, 32 << 20)  # the most that glibc takes, if it is not a new one
    tune(_TRIM_THRESHOLD, _LARGEST_KEPT)


def return_freed_memory() -> None:
    """Return free heap memory to the system, if the C library is glibc: useful after building a model of which only the
    weights are kept.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def collect_garbage() -> None:
    """Return the memory of objects that hold one another in circles, as traced modules do, to the system."""
    gc.collect()
    return_freed_memory()


def spare_the_collector() -> None:
    """Exclude all existing objects, mostly modules, from later garbage collections."""
    gc.collect()
    gc.freeze()


def when_asked_to_end(handle: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    """Set the handler of SIGTERM, SIGINT and SIGHUP; SIGHUP stays ignored if it is, as under nohup."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handle)


def lower_priority(by: int) -> None:
    """Add this many steps to this process's `nice` value, and on Linux to that of its session.

    Linux may share the CPU among sessions first (autogroups, the default of most desktops): `nice` then counts within
    a session alone. So this process begins a session of its own, if it may; a leader of a process group may not.
    """
    value = os.nice(by)
    if by > 0 and sys.platform == "linux":
        with contextlib.suppress(OSError):
            if os.getsid(0) != os.getpid():
                os.setsid()
            set_session_priority(value)


def set_session_priority(value: int, process: int | str = "self") -> None:
    """Give the session of a process this `nice` value, if this system has autogroups."""
    autogroup = Path(f"/proc/{process}/autogroup")
    for _ in range(50):
        try:
            autogroup.write_text(str(value))
        except BlockingIOError:  # a user may change one every 0.1 s
            time.sleep(0.1)
        except OSError:
            return
        else:
            return


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
    """End this process `patience_s` after `stop` is set, even if it hangs in a call to a broker that is away.

    While `busy` returns True, the end waits. `last` is called right before the end, then `code` for the exit code.
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
    """Log plain lines on standard error: time, level, event, fields. The processors `also` run before the rendering."""
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
