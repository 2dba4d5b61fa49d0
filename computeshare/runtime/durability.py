"""Flushes written files to the disk, and explains why a disk takes no writes."""

import errno
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

FULL_FSYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)
"""macOS only: its fsync leaves data in the drive's cache, which a loss of power empties."""

UNSUPPORTED = (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY)
"""Errors of a file system without F_FULLFSYNC, such as a network share."""


NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class Disk:
    """The current state of the disk that a folder lies on."""

    folder: Path
    free_bytes: int
    is_read_only: bool

    @classmethod
    def of(cls, folder: Path) -> Self:
        """The disk of a folder, which need not exist yet. Raises OSError."""
        there = next(path for path in (folder, *folder.parents) if path.is_dir())
        stat = os.statvfs(there)
        return cls(there, stat.f_bavail * stat.f_frsize, bool(stat.f_flag & os.ST_RDONLY))

    def obstacle(self, bytes_needed: int) -> str | None:
        """Why `bytes_needed` bytes cannot be written, and what would help; None if they can."""
        if self.is_read_only:
            return f"the disk of {self.folder} is read-only. Mount it for writing"
        if self.free_bytes < bytes_needed:
            return f"{self.free_bytes / 1e6:,.0f} MB are free in {self.folder}. Make room there"
        return None

    def explained(self, error: OSError) -> str:
        """Why a write failed with this error, and what would help."""
        cause = error.strerror or str(error)
        if error.errno == errno.EROFS or self.is_read_only:
            return f"{cause}: the disk of {self.folder} is read-only. Mount it for writing"
        if error.errno in NO_ROOM:
            return f"{cause}; {self.free_bytes / 1e6:,.0f} MB are free in {self.folder}. Make room there"
        return f"{cause}. Look after {self.folder}, which cannot be written to"


def flush(path: Path) -> None:
    """Return once the disk holds a file, or a folder's entries. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        flush_open(descriptor)
    finally:
        os.close(descriptor)


def flush_open(descriptor: int) -> None:
    """As `flush`, for a file that is open. Raises OSError."""
    if FULL_FSYNC is not None:
        try:
            fcntl.fcntl(descriptor, FULL_FSYNC)
            return
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
    os.fsync(descriptor)
