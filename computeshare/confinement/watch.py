"""Keeps a confined process to its share of memory, processes and disk: ends it, and says why."""

import shutil
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

from computeshare.confinement import scratch as folder_use
from computeshare.confinement.command import MOST_TASKS

MOST_ENTRIES = 50_000
"""Files and folders below the scratch folder."""
SPARE_BYTES = 1 << 30
"""Below this free space on the scratch folder's disk, the process ends whoever filled it."""
_LOOK_S, _LIST_S, _DISK_S = 0.1, 0.5, 2.0


class Watch:
    """The watch over one process; `reason` says why the process was ended, if it was."""

    def __init__(self, process: "subprocess.Popen[bytes]", memory_bytes: int, scratch: Path | None, scratch_bytes: int):
        self.reason = ""
        self.lacks_room = False
        """Whether the reason is memory, or space on the disk, of which another machine may have more."""
        self.peak_bytes = 0
        """The most memory seen."""
        self._process = process
        self._memory_bytes, self._scratch, self._scratch_bytes = memory_bytes, scratch, scratch_bytes
        self._family: list[psutil.Process] = []
        self._listed = self._disk_seen = 0.0
        self._thread = threading.Thread(target=self._watch, name="recipe-watch", daemon=True)
        self._thread.start()

    def end(self, reason: str) -> None:
        """End the process, and all that it started, for this reason."""
        self.reason = self.reason or reason
        self._process.kill()

    def why(self) -> str:
        """Why the process ended, as the end of a sentence on it; waits until it has."""
        code = self._process.wait()
        self._thread.join()
        return f"was {self.reason}" if self.reason else ended(code)

    def _watch(self) -> None:
        tick = threading.Event()
        while self._process.poll() is None:
            with suppress(psutil.NoSuchProcess):
                reason = self._excess(time.monotonic())
                if reason:
                    self.end(reason)
                    return
            tick.wait(_LOOK_S)

    def _excess(self, now: float) -> str:
        if now - self._listed >= _LIST_S:
            first = psutil.Process(self._process.pid)
            self._family = [first, *first.children(recursive=True)]
            self._listed = now
            tasks = sum(one.num_threads() for one in self._family if one.is_running())
            if tasks > MOST_TASKS:
                return f"killed: it started {tasks} processes and threads, of the {MOST_TASKS} allowed"
        if self._memory_bytes and (taken := self._memory()) > self._memory_bytes:
            self.lacks_room = True
            return f"killed: it took {_size(taken)} of the {_size(self._memory_bytes)} of memory allowed"
        if self._scratch and now - self._disk_seen >= _DISK_S:
            self._disk_seen = now
            return self._excess_on_disk(self._scratch)
        return ""

    def _memory(self) -> int:
        taken = sum(_resident(one) for one in self._family)
        if taken > self._memory_bytes and len(self._family) > 1:  # what they share counts once: slow to find
            taken = sum(_proportional(one) for one in self._family)
        self.peak_bytes = max(self.peak_bytes, taken)
        return taken

    def _excess_on_disk(self, scratch: Path) -> str:
        if shutil.disk_usage(scratch).free < SPARE_BYTES:
            self.lacks_room = True
            return f"killed: less than {_size(SPARE_BYTES)} are free on the disk of its folder"
        try:
            found = folder_use.use(scratch, MOST_ENTRIES)
        except OSError as error:
            return f"killed: it wrote a folder that cannot be looked into: {error.strerror}"
        if found.bytes > self._scratch_bytes:
            return f"killed: it wrote {_size(found.bytes)} of the {_size(self._scratch_bytes)} allowed"
        if found.entries > MOST_ENTRIES:
            return f"killed: it wrote more than the {MOST_ENTRIES:,} files allowed"
        return ""


def watch(
    process: "subprocess.Popen[bytes]",
    memory_bytes: int = 0,
    *,
    scratch: Path | None = None,
    scratch_bytes: int = 16 << 30,
) -> Watch:
    """Watch a process of `process.start` until it ends, in a thread.

    Args:
        memory_bytes: most resident memory of it and of all that it started, shared memory included; 0: no limit.
        scratch: its folder; None: its disk use is not watched.
    """
    return Watch(process, memory_bytes, scratch, scratch_bytes)


def ended(code: int) -> str:
    """How a process ended by itself, from its `returncode`, as the end of a sentence."""
    number = -code if code < 0 else code - 128 if code > 128 else 0  # bubblewrap adds 128
    with suppress(ValueError):
        if number:
            return f"ended by {signal.Signals(number).name}"
    return f"ended with exit code {code}"


def _resident(one: psutil.Process) -> int:
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return int(one.memory_info().rss)
    return 0


def _proportional(one: psutil.Process) -> int:
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        about = one.memory_full_info()
        return int(about.pss if hasattr(about, "pss") else about.uss)
    return _resident(one)


def _size(count: float) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
