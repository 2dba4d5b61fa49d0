"""A parser for replies in RESP, the protocol of Redis and Valkey (versions 2 and 3), without I/O.

Large values can be received directly into the caller's buffers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from redis._parsers import BaseParser  # redis-py maps errors to exceptions only here
from redis.exceptions import BusyLoadingError, InvalidResponse

from computeshare.errors import CodecError

_KEPT = 1 << 16
_LONGEST_BULK = 1 << 30
_DEEPEST = 64
_AGGREGATES = {b"*": 1, b"~": 1, b">": 1, b"%": 2, b"|": 2}
"""Reply types that contain other values, and the number of values per entry."""
_ASIDE = (b">", b"|")
"""Pushes and attributes, which may arrive between replies and answer no command."""
_BULKS = (b"$", b"=", b"!")


@dataclass(slots=True)
class _Open:
    """An aggregate whose last values have not arrived yet."""

    kind: bytes
    missing: int
    values: list[Any] = field(default_factory=list)

    def close(self) -> Any:
        if self.kind != b"%":
            return self.values
        try:
            return dict(zip(self.values[::2], self.values[1::2], strict=True))
        except TypeError as error:
            raise InvalidResponse("a map has a key that cannot be a key") from error


class ReplyParser:
    """Parses replies from a byte stream, however it is cut: write into `space`, then call `received` with the number of
    bytes.

    Bulk strings become bytes, or consecutive views of the buffer that `expect` was given for their command. Errors
    become exceptions at their places.
    """

    def __init__(self) -> None:
        self._buffer = bytearray(_KEPT)
        self._kept = memoryview(self._buffer)
        self._start = self._end = 0
        self._open: list[_Open] = []
        self._kind = b""  # of the bulk that is being received; empty between bulks
        self._bulk: memoryview | None = None  # None: it is dropped
        self._bulk_size = self._bulk_missing = 0
        self._found: list[Any] = []
        self._into: Sequence[memoryview | None] = ()
        self._into_at = 0
        self._errors: list[tuple[int, Exception]] = []  # each with the index of its reply

    def expect(self, into: Sequence[memoryview | None]) -> None:
        """Start parsing as many replies as `into` has entries; all earlier replies must be complete."""
        self._found, self._into, self._into_at, self._errors = [], into, 0, []
        self._parse()

    @property
    def expected(self) -> int:
        """The number of replies still to be taken, complete or not."""
        return len(self._into)

    @property
    def missing(self) -> int:
        """The number of incomplete replies."""
        return len(self._into) - len(self._found)

    @property
    def waiting(self) -> bytes:
        """Received bytes that are not parsed yet; with no reply missing, nobody requested them."""
        return self._kept[self._start : self._end].tobytes()

    def take(self, count: int) -> tuple[list[Any], Exception | None]:
        """Remove the first `count` replies, which must be complete; returns them and the first error among them."""
        found, self._found, self._into = self._found[:count], self._found[count:], self._into[count:]
        error = next((error for index, error in self._errors if index < count), None)
        self._errors = [(index - count, error) for index, error in self._errors if index >= count]
        return found, error

    def space(self) -> memoryview:
        """The memory for the next bytes; never empty."""
        if self._bulk_missing and self._bulk is not None:
            return self._bulk[-self._bulk_missing :]
        if self._bulk_missing:
            return self._kept[: self._bulk_missing]
        if self._start:
            unread = self._end - self._start
            self._kept[:unread] = self._kept[self._start : self._end]
            self._start, self._end = 0, unread
        return self._kept[self._end :]

    def received(self, count: int) -> None:
        """Parse `count` bytes that were written into `space`. Raises InvalidResponse: they are not RESP."""
        if self._bulk_missing:
            self._bulk_missing -= count
        else:
            self._end += count
        self._parse()

    def _parse(self) -> None:
        while self.missing:
            if self._kind:
                if not self._finish_bulk():
                    return
            elif not self._begin():
                return

    def _begin(self) -> bool:
        """Parse a reply's first line, and its value if at hand; False: the line is incomplete."""
        at = self._buffer.find(b"\r\n", self._start, self._end)
        if at < 0:
            if self._end - self._start == _KEPT:
                raise InvalidResponse("a line without an end")
            return False
        line = self._kept[self._start : at].tobytes()
        kind, text = line[:1], line[1:]
        self._start = at + 2
        try:
            if kind in _BULKS and text != b"-1":
                self._begin_bulk(kind, int(text))
            elif kind in _AGGREGATES and text != b"-1":
                self._begin_aggregate(kind, int(text))
            else:
                self._add(self._scalar(kind, text))
        except ValueError as error:
            raise InvalidResponse(f"not a reply: {line[:40]!r}") from error
        return True

    def _scalar(self, kind: bytes, text: bytes) -> Any:
        match kind:
            case b"+":
                return text
            case b":" | b"(":
                return int(text)
            case b"-":
                return self._failure(text)
            case b"_" | b"$" | b"*":
                return None
            case b",":
                return float(text)
            case b"#" if text in (b"t", b"f"):
                return text == b"t"
        raise ValueError

    def _failure(self, text: bytes) -> Exception:
        said = text.decode(errors="replace")
        if said.startswith("BUSY "):  # with a script, and away for everybody else
            return self._note(BusyLoadingError(said))
        return self._note(BaseParser.parse_error(said))  # type: ignore[no-untyped-call]

    def _note(self, error: Exception) -> Exception:
        self._errors.append((len(self._found), error))
        return error

    def _begin_aggregate(self, kind: bytes, entries: int) -> None:
        if entries < 0 or len(self._open) == _DEEPEST:
            raise ValueError
        self._open.append(_Open(kind, entries * _AGGREGATES[kind]))
        if not entries:
            self._close()

    def _begin_bulk(self, kind: bytes, size: int) -> None:
        if not 0 <= size <= _LONGEST_BULK:
            raise ValueError
        self._kind, self._bulk_size = kind, size
        self._bulk = self._room(kind, size)
        here = min(size, self._end - self._start)
        if self._bulk is not None:
            self._bulk[:here] = self._kept[self._start : self._start + here]
        self._start += here
        self._bulk_missing = size - here
        if self._bulk_missing:
            self._start = self._end = 0

    def _room(self, kind: bytes, size: int) -> memoryview | None:
        """The memory for a bulk string: the command's buffer, or new memory; None if the buffer is too small."""
        into = self._into[len(self._found)]
        if into is None or kind == b"!" or any(each.kind in (*_ASIDE, b"%") for each in self._open):
            return memoryview(bytearray(size))
        if size > len(into) - self._into_at:
            return None
        self._into_at += size
        return into[self._into_at - size : self._into_at]

    def _finish_bulk(self) -> bool:
        """Close a bulk string, including its line end; False: it is incomplete."""
        if self._bulk_missing or self._end - self._start < 2:
            return False
        if not self._buffer.startswith(b"\r\n", self._start):
            raise InvalidResponse("a value without an end")
        self._start += 2
        kind, bulk, self._kind, self._bulk = self._kind, self._bulk, b"", None
        self._add(self._closed(kind, bulk))
        return True

    def _closed(self, kind: bytes, bulk: memoryview | None) -> Any:
        if bulk is None:
            return self._note(CodecError(f"a value of {self._bulk_size} bytes came where there was room for fewer"))
        if kind == b"!":
            return self._failure(bulk.tobytes())
        if kind == b"=":
            bulk = bulk[4:]
        into = self._into[len(self._found)]
        return bulk if into is not None and bulk.obj is into.obj else bulk.tobytes()

    def _add(self, value: Any) -> None:
        """Add a value to the innermost open aggregate, else to the replies."""
        if not self._open:
            self._found.append(value)
            self._into_at = 0
            return
        innermost = self._open[-1]
        innermost.values.append(value)
        innermost.missing -= 1
        if not innermost.missing:
            self._close()

    def _close(self) -> None:
        done = self._open.pop()
        if done.kind not in _ASIDE:
            self._add(done.close())
