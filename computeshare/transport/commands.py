"""Redis commands encoded as buffers for a socket: large values are neither joined nor copied."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
from redis.exceptions import DataError
from typing_extensions import Buffer

Blob = Buffer | npt.NDArray[Any]
Argument = str | int | float | Blob
Command = Sequence[Argument]

AHEAD = 1 << 23
"""Bytes of large replies to request from a broker at a time."""
_SMALL = 4096  # bytes up to which copying a value costs less than a piece of its own
_PIECES = 64


def as_view(blob: object) -> memoryview:
    """The bytes of a contiguous buffer, as a view. Raises DataError: `blob` is not a contiguous buffer."""
    try:
        view = memoryview(blob)  # type: ignore[arg-type]  # an array is a Buffer from Python 3.12 on
        if view.ndim:
            return view.cast("B") if view.nbytes else memoryview(bytearray())
    except TypeError as error:
        raise DataError(
            f"a {type(blob).__name__} cannot be sent: convert it to bytes, text or a number ({error})"
        ) from error
    raise DataError(f"a {type(blob).__name__} cannot be sent: convert it to an int or a float")


def frame(command: Command) -> list[memoryview]:
    """A command encoded in RESP, in as few buffers as possible without copying a large value.

    Raises: DataError: an argument is neither text, number nor bytes.
    """
    pieces: list[memoryview] = []
    head = bytearray(b"*%d\r\n" % len(command))
    for argument in command:
        value = _as_bytes(argument)
        head += b"$%d\r\n" % len(value)
        if len(value) <= _SMALL:
            head += value
        else:
            pieces += (memoryview(head), memoryview(value))
            head = bytearray()
        head += b"\r\n"
    return [*pieces, memoryview(head)]


def _as_bytes(argument: Argument) -> bytes | memoryview:
    if isinstance(argument, bytes):
        return argument
    if isinstance(argument, str):
        return argument.encode()
    if isinstance(argument, int) and not isinstance(argument, bool):
        return b"%d" % argument
    if isinstance(argument, float):
        return float.__repr__(argument).encode()
    return as_view(argument)


class Outgoing:
    """Commands to be sent, from the first unsent byte on.

    Commands with large replies are held back while `AHEAD` bytes of replies are outstanding: a broker that must buffer
    them all allocates fresh memory, which costs it more time than sending them.

    Args:
        commands: the commands to send.
        expected: for each command, the largest size of its reply in bytes; 0 for a small reply.
    """

    def __init__(self, commands: Sequence[Command], expected: Sequence[int]) -> None:
        self._held = deque((frame(command), size) for command, size in zip(commands, expected, strict=True))
        self._expected = deque(expected)  # of the commands that were not answered
        self._ahead = 0
        self._pieces: deque[memoryview] = deque()
        self.ready = 0
        """Bytes that may be sent now."""
        self._release()

    @property
    def left(self) -> bool:
        """Whether any bytes are still unsent."""
        return bool(self._pieces or self._held)

    def answered(self, count: int) -> None:
        """Record that `count` more commands were answered."""
        for _ in range(count):
            self._ahead -= self._expected.popleft()
        self._release()

    def head(self, limit: int) -> list[memoryview]:
        """The next buffers to send, at most `limit` bytes in all."""
        found: list[memoryview] = []
        for piece in self._pieces:
            if limit <= 0 or len(found) == _PIECES:
                break
            found.append(piece[:limit])
            limit -= len(piece)
        return found

    def sent(self, count: int) -> None:
        """Record that `count` bytes were sent."""
        self.ready -= count
        while self._pieces and count >= len(self._pieces[0]):
            count -= len(self._pieces.popleft())
        if count:
            self._pieces[0] = self._pieces[0][count:]

    def _release(self) -> None:
        while self._held and (not self._ahead or not self._held[0][1] or self._ahead + self._held[0][1] <= AHEAD):
            pieces, size = self._held.popleft()
            self._ahead += size
            self._pieces += pieces
            self.ready += sum(map(len, pieces))
