"""Parses and validates events. Pure.

Events come from workers too, so nothing in them is trusted: every text and number is checked and bounded. Malformed
input raises KeyError, TypeError or ValueError.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic_core import from_json

from computeshare.protocol.limits import EVENT_BYTES
from computeshare.types import Kind, Outcome, Token

Row = dict[str, Any]
RawEntry = tuple[bytes, dict[bytes, bytes]]
"""An entry of a stream as the broker returns it: its id and its fields."""
OUTCOMES: tuple[Outcome, ...] = ("accepted", "stale", "duplicate", "lease_lost", "fenced", "refused")
NAME_LENGTH, TEXT_LENGTH, TRACE_LENGTH = 100, 500, 20_000
MOST_METRICS = 50
"""The most metrics of a recipe's own in a score."""
LARGEST = 2**40
"""Counts in an event are below this number, so that a sum of many still fits an integer column."""
LATEST_MS = 253_402_300_800_000
"""The year 10,000 in milliseconds: `datetime` ends before it."""
_DIGEST = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """An event, parsed and checked for its outer shape; its data is checked by its handler."""

    stream_id: str
    type: str
    at_ms: int
    data: Row


def read_event(stream_id: bytes, fields: dict[bytes, bytes]) -> StreamEvent:
    """Parse an entry of a stream. Raises KeyError, TypeError or ValueError where it is malformed."""
    if len(fields[b"data"]) > EVENT_BYTES:
        raise ValueError(f"an event of {len(fields[b'data'])} bytes")
    data = from_json(fields[b"data"])
    if not isinstance(data, dict):
        raise TypeError("the event's data is no object")
    at_ms = int(float(fields[b"at"]))
    if not 0 <= at_ms < LATEST_MS:
        raise ValueError("the event's time is out of range")
    return StreamEvent(stream_id.decode(), fields[b"type"].decode(), at_ms, data)


def text_of(value: object, length: int = TEXT_LENGTH) -> str:
    """Any value as text of at most `length` characters."""
    text = value if isinstance(value, str) else str(value)
    return text[:length].encode("utf-8", "replace").decode()


def name_of(value: object) -> str:
    """A text, cut to `NAME_LENGTH` characters."""
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value if len(value) <= NAME_LENGTH and value.isascii() else text_of(value, NAME_LENGTH)


@lru_cache(maxsize=1024)
def token_of(value: str) -> Token:
    """Parse a version's token. A token is also a folder's name, so every part is checked."""
    token = Token.parse(value)
    count_of(token.incarnation)
    count_of(token.version)
    if not _DIGEST.fullmatch(token.digest16):
        raise ValueError("not a digest")
    return token


def version_of(token: str) -> int | None:
    """A token's version; None for the empty text, which stands for no version."""
    return token_of(token).version if token else None


def kind_of(value: object) -> Kind:
    """A machine's kind: at most 12 short texts and counts by name."""
    if not isinstance(value, dict):
        raise TypeError("not a kind")
    return {name_of(k): count_of(v) if isinstance(v, int) else name_of(v) for k, v in list(value.items())[:12]}


def count_of(value: object) -> int:
    """An integer from 0 up to, but not including, `LARGEST`."""
    if type(value) is not int or not 0 <= value < LARGEST:
        raise ValueError("not a count, or one out of range")
    return value


def numbers_of(values: Iterable[object]) -> list[int]:
    """Micro-batch numbers, at most 4,096."""
    numbers = [count_of(value) for value in values]
    if len(numbers) > 4096:
        raise ValueError("too many micro-batches")
    return numbers


def finite_of(value: object) -> float:
    """A finite number."""
    number = optional_of(value)
    if number is None:
        raise ValueError("not a finite number")
    return number


def optional_of(value: object) -> float | None:
    """A number; None for NaN and infinities, which JSON cannot represent."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError("not a number")
    number = float(value)
    return number if math.isfinite(number) else None


def memory_of(data: Row) -> int | None:
    """The bytes of memory that a worker reports for its seat; None if it reports none."""
    return count_of(data.get("memory_bytes", 0)) or None


def stream_position(stream_id: str) -> tuple[int, int]:
    """A stream id as its milliseconds and its sequence number, which order a stream."""
    milliseconds, sequence = stream_id.split("-")
    return int(milliseconds), int(sequence)
