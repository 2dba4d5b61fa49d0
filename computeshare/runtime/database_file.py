"""The control plane's SQLite file: check for damage, daily copies, and advice on how to restore a damaged file."""

import contextlib
import errno
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from computeshare.errors import DatabaseDamaged
from computeshare.runtime.durability import flush

CHECK_S = 3.0
"""Seconds that a start spends on the check for damage: enough for 1 GB in memory or a few hundred MB on disk."""
KEPT = 3
"""The number of copies kept."""
DAY_S = 24 * 3600.0
BUSY_S = 5.0
_STEPS = 10_000
"""Steps of SQLite's virtual machine between checks of the clock: a few milliseconds."""
_DAMAGE = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})


def is_damage(error: BaseException | None) -> bool:
    """Whether this error of the sqlite3 driver means that the file itself is damaged."""
    return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGE


@dataclass(frozen=True, slots=True)
class DatabaseFile:
    """The database file, and the folder of its copies."""

    path: Path
    backups: Path

    def damage(self, patience_s: float) -> str | None:
        """The damage that SQLite finds in the file within `patience_s`; None without damage, or without a file.

        Raises: TimeoutError: SQLite has found no damage so far, and has not read the file to its end.
        """
        if not self.path.exists() or not self.path.stat().st_size:
            return None
        found: list[str] = []
        ended = threading.Event()
        # In a thread: only newer releases of SQLite can be interrupted while they walk through a tree.
        look = threading.Thread(target=self._look, args=(found, ended, time.monotonic() + patience_s), daemon=True)
        look.start()
        look.join(patience_s)
        if not found and not ended.is_set():
            raise TimeoutError(f"the check for damage did not end within {patience_s:g} s")
        return "; ".join(found) or None

    def _look(self, found: list[str], ended: threading.Event, deadline: float) -> None:
        try:
            with closing(_open_for_reading(self.path, BUSY_S)) as connection:
                connection.set_progress_handler(lambda: time.monotonic() > deadline, _STEPS)
                for (line,) in connection.execute("PRAGMA quick_check(3)"):
                    if line != "ok":
                        found.append(" ".join(line.split()))
            ended.set()
        except sqlite3.Error as error:
            if error.sqlite_errorcode not in (sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_BUSY):  # no time, no look
                found.append(str(error))

    def require_whole(self, patience_s: float) -> None:
        """Raises DatabaseDamaged, with advice, if damage is found within `patience_s`."""
        with contextlib.suppress(TimeoutError):  # a large file does not delay a start further
            if trouble := self.damage(patience_s):
                raise DatabaseDamaged(f"{self.path} is damaged ({trouble}): {self.advice()}")

    def advice(self) -> str:
        """Advice for continuing after the file was damaged."""
        files = f"{self.path.name}, {self.path.name}-wal and {self.path.name}-shm"
        return f"stop computeshare, move {files} out of {self.path.parent}, {self.way_back()}, and start it again"

    def way_back(self) -> str:
        """How to replace a lost file: by the newest copy, or a copy of the user's own."""
        if copy := self.newest_copy():
            made = time.strftime("%Y-%m-%d %H:%M", time.localtime(copy.stat().st_mtime))
            return f"restore the newest copy, of {made} (cp {copy} {self.path})"
        return f"restore a copy of your own if you have one ({self.backups} holds none yet)"

    def copies(self) -> list[Path]:
        """The copies, oldest first."""
        return sorted(self.backups.glob(f"{self.path.stem}-*.db"), key=lambda copy: (copy.stat().st_mtime, copy.name))

    def newest_copy(self) -> Path | None:
        return next(reversed(self.copies()), None)

    def is_due(self, now_s: float) -> bool:
        """Whether there is no copy, or the newest is at least a day old at `now_s` or dated in the future, by a clock
        that was ahead.
        """
        newest = self.newest_copy()
        return newest is None or not 0 <= now_s - newest.stat().st_mtime < DAY_S

    def copy(self, now_s: float, stopping: Callable[[], bool] = lambda: False) -> Path:
        """Make a copy and delete the oldest surplus copies. Readers and writers of the database do not wait. Copies
        dated in the future are dated anew, so that this one is the newest.

        Raises: sqlite3.Error: the file cannot be read to its end, or this process is `stopping`. OSError: no room.
        After an error the earlier copies remain.
        """
        self.backups.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._require_room()
        for left in self.backups.glob(f"{self.path.stem}-*.partial"):
            left.unlink(missing_ok=True)
        made = self.backups / f"{self.path.stem}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now_s))}.db"
        partial = made.with_suffix(".partial")
        partial.touch(0o600)  # before SQLite does: it holds secrets
        try:
            with closing(_open_for_reading(self.path, BUSY_S)) as connection:
                connection.set_progress_handler(stopping, _STEPS)
                connection.execute("VACUUM INTO ?", (str(partial),))
            flush(partial)  # VACUUM INTO does not
            for ahead in (copy for copy in self.copies() if copy.stat().st_mtime >= now_s):
                os.utime(ahead, (now_s - 1, now_s - 1))
            os.utime(partial, (now_s, now_s))
            partial.replace(made)
            flush(self.backups)
        finally:
            partial.unlink(missing_ok=True)
        for old in self.copies()[:-KEPT]:
            old.unlink(missing_ok=True)
        return made

    def _require_room(self) -> None:
        """Raises OSError if a copy would leave less free room than its own size: jobs need the rest."""
        needed = 2 * self.path.stat().st_size
        if shutil.disk_usage(self.backups).free < needed:
            raise OSError(errno.ENOSPC, f"a copy needs {needed:,} free bytes", str(self.backups))


def _open_for_reading(path: Path, patience_s: float) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=patience_s, isolation_level=None)
