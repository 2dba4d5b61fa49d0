"""Copies the database every day, in case the file is damaged or deleted."""

import sqlite3
import threading
import time

import structlog

from computeshare.runtime.database_file import DatabaseFile

RETRY_S = 600.0
"""Seconds from a failed copy to the next try; the usual cause is a full disk."""

log = structlog.get_logger()


class Backups:
    """Copies the database when a copy is due; a background loop calls `step`."""

    def __init__(self, file: DatabaseFile, stop: threading.Event) -> None:
        self._file, self._stop = file, stop
        self._not_before = float("-inf")

    def step(self) -> None:
        """Copy the database if a copy is due. A failure is logged and tried again after `RETRY_S`; jobs run on."""
        now_s = time.time()
        if time.monotonic() < self._not_before or not self._file.is_due(now_s):
            return
        try:
            copy = self._file.copy(now_s, self._stop.is_set)
        except (sqlite3.Error, OSError) as error:
            self._not_before = time.monotonic() + RETRY_S
            log.warning("cannot copy the database", to=str(self._file.backups), error=str(error))
        else:
            log.info("copied the database", to=str(copy), bytes=copy.stat().st_size)
