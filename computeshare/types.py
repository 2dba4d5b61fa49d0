"""Vectors and the values that pass between processes."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]
Counters = npt.NDArray[np.int64]
Blob = bytes | bytearray | memoryview
Message = Sequence[Blob | None]
"""What lies under one key, part by part; a part that was never sent is None."""

Outcome = Literal["accepted", "stale", "duplicate", "lease_lost", "fenced", "refused"]
JobStatus = Literal["queued", "running", "paused", "completed", "failed", "cancelled"]
JobSort = Literal["newest", "oldest", "name", "accuracy", "updated"]
"""What a list of jobs can be ordered by: `accuracy` the best first, `updated` the latest."""
Kind = dict[str, str | int]
"""What a machine's bits depend on, by name: device, processor, torch's version and so on."""
ENDED: frozenset[JobStatus] = frozenset({"completed", "failed", "cancelled"})
JOB_ID = re.compile(r"[a-z0-9]{3,32}")
"""A job's id: it becomes part of keys, of seats' ids and of the names of folders."""
_TOKEN = re.compile(r"([0-9]{1,18})\.([0-9]{1,18})\.([0-9a-f]{16})")


@dataclass(frozen=True, slots=True)
class Token:
    """A version's identity, `incarnation.version.digest16`, compared as a whole string.

    `incarnation` grows whenever a job is restored from a checkpoint, so that work done on
    weights the broker has since lost can never be mistaken for work on the current ones.
    """

    incarnation: int
    version: int
    digest16: str

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.version}.{self.digest16}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a token back. Raises ValueError if `text` is none: a token names a checkpoint's folder, too."""
        match = _TOKEN.fullmatch(text)
        if not match:
            raise ValueError(f"not a version token: {text[:100]!r}")
        incarnation, version, digest16 = match.groups()
        return cls(int(incarnation), int(version), digest16)


def plain(value: object, lines: bool = False) -> str:
    """Any value as text without anything that a terminal would obey: on one line, or on as many `lines` as it has."""
    kept = "\n\t" if lines else ""
    return "".join(c if c.isprintable() or c in kept else "\N{REPLACEMENT CHARACTER}" for c in str(value))
