"""Having the disk hold what was written."""

import errno
import fcntl
import os
from pathlib import Path

FULL_FSYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)
"""macOS alone: its fsync leaves the data in the drive's cache, which a loss of power empties."""

UNSUPPORTED = (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY)
"""What a file system answers that cannot do that: a network share, for one."""


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
