"""Vectors, and values exchanged between processes."""

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
"""The parts of a value under one Redis key; a part that was never sent is None."""

Outcome = Literal["accepted", "stale", "duplicate", "lease_lost", "fenced", "refused"]
JobStatus = Literal["queued", "running", "paused", "completed", "failed", "cancelled"]
JobSort = Literal["newest", "oldest", "name", "accuracy", "updated"]
"""The orders of a list of jobs: `accuracy` is best first, `updated` latest first."""
Precision = Literal["float32", "bfloat16"]
"""The precision of forward and backward passes; `bfloat16` uses `torch.autocast` with float32 weights and gradients."""
Kind = dict[str, str | int]
"""Properties of a machine that determine its floating-point results: device, processor, torch's version etc."""
ENDED: frozenset[JobStatus] = frozenset({"completed", "failed", "cancelled"})
JOB_ID = re.compile(r"[a-z0-9]{3,32}")
"""The form of a job's id, which becomes part of Redis keys, of seats' ids and of folder names."""
ID_LENGTH = 8
"""Characters of the ids of jobs that the control plane makes."""
MACHINE_CHARACTERS = 8
"""The ids of an invited machine's workers begin with the same characters, this many; other workers' ids are random."""
_TOKEN = re.compile(r"([0-9]{1,18})\.([0-9]{1,18})\.([0-9a-f]{16})")


@dataclass(frozen=True, slots=True)
class Token:
    """A version's identity, `incarnation.version.digest16`, compared as a whole string.

    `incarnation` grows whenever a job is restored from a checkpoint, so that work on weights that the broker has since
    lost is never mistaken for work on the current weights.
    """

    incarnation: int
    version: int
    digest16: str

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.version}.{self.digest16}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a token. Raises ValueError: `text` is malformed, and unsafe as a checkpoint's folder name."""
        match = _TOKEN.fullmatch(text)
        if not match:
            raise ValueError(f"not a version token: {text[:100]!r}")
        incarnation, version, digest16 = match.groups()
        return cls(int(incarnation), int(version), digest16)


def machine_of(worker_id: str) -> str:
    """The prefix that the ids of an invited machine's workers share; any other worker counts as a machine."""
    return worker_id[:MACHINE_CHARACTERS]


def plain(value: object, lines: bool = False) -> str:
    """A value as text, safe for a terminal: unprintable characters are replaced, also newlines unless `lines`."""
    kept = "\n\t" if lines else ""
    return "".join(c if c.isprintable() or c in kept else "\N{REPLACEMENT CHARACTER}" for c in str(value))


_PLAIN = (
    (re.compile(r"^Value error, "), ""),
    (re.compile(r"^(Input|String|List|Tuple|Set|Dictionary|Value) should "), "must "),
    (re.compile(r", unable to (parse|interpret) .*"), ""),
    (re.compile(r"\ba valid boolean"), "true or false"),
    (re.compile(r"\ba valid (?=[aeio])"), "an "),
    (re.compile(r"\ba valid "), "a "),
    (re.compile(r"\bgreater than or equal to "), "at least "),
    (re.compile(r"\bless than or equal to "), "at most "),
)
"""Words of pydantic, and what is said in their place."""


def plain_message(message: str) -> str:
    """A message of pydantic in the words of the command line: "must be at least 1"."""
    for words, said in _PLAIN:
        message = words.sub(said, message)
    return message
