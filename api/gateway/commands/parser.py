"""Parses the commands that a machine sends (RESP arrays of bulk strings), without I/O, in bounded memory.

A command is decided on before anything of it is passed on: small ones when they are complete, those with large values
once the arguments before the values are there. What follows is then passed on, or skipped, as it comes.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from computeshare.errors import ComputeShareError

MOST_ARGUMENTS = 20_000
HELD_BYTES = 1 << 20
"""The most bytes of a command that are held until it is decided on; a longer one is not decided on."""
CALL_BYTES = 2 * HELD_BYTES
"""The same for a call of a script: `submit` of 3,000 units names 6,000 keys."""
COMMAND_BYTES = 1 << 28
"""The most bytes of a command: the broker holds it in memory until it is complete."""
LONGEST_LINE = 16
Piece = bytes | memoryview
_NUMBER = re.compile(rb"0|[1-9][0-9]{0,9}")
_OVERHEAD = 64  # bytes of memory that a short argument takes beyond its own


class NotACommand(ComputeShareError):
    """The bytes are no command in RESP, or exceed a limit: no end of a command can be found, so the connection ends."""


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of a command: its arguments, the first being its name; `count` is the number of all arguments.

    It is incomplete if the command has large values, or is longer than what is held.
    """

    arguments: tuple[bytes, ...]
    count: int

    @property
    def is_complete(self) -> bool:
        return len(self.arguments) == self.count


class Commands:
    """A machine's commands, one after another: `push` what was received, look at `head`, then call `accept` or `skip`.

    Args:
        is_enough: whether a command can be decided on with these arguments alone, since large values follow.
    """

    def __init__(self, is_enough: Callable[[list[bytes]], bool]) -> None:
        self._is_enough = is_enough
        self._data = b""
        self._at = 0
        self._count = 0  # arguments of the command that is being read; 0 between commands
        self._arguments: list[bytes] = []
        self._held = self._total = 0
        self._size = -1  # of the argument that is being read; -1: its length has not arrived
        self._head: Head | None = None
        self._left = 0  # arguments still to come of a command that was decided on
        self._bulk = 0  # bytes still to come of the argument, with its line end
        self._passes = False
        self._ending: tuple[bytes, ...] = ()

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that are held at present, about."""
        announced = max(0, self._size)  # of the argument that is being read: what has come of it is in `_data`
        return len(self._data) - self._at + self._held - announced

    @property
    def total_bytes(self) -> int:
        """Bytes of memory that the arguments take that have arrived of the command read last, about."""
        return self._total

    @property
    def unfinished_bytes(self) -> int:
        """Bytes that the broker is about to hold of a command that has passed in part."""
        return self._total if self._left and self._passes else 0

    def push(self, data: bytes) -> None:
        """Add bytes that were received."""
        self._data = self._data[self._at :] + data if self._at < len(self._data) else data
        self._at = 0

    def rest(self) -> list[Piece]:
        """The bytes received so far of the command decided on last, in pieces to send; none if that command is skipped.

        Raises NotACommand.
        """
        pieces: list[Piece] = []
        while self._left and self._at < len(self._data):
            if not self._bulk:
                if (size := self._length(b"$")) is None:
                    break
                self._add(size)
                self._bulk = size + 2
                if self._left <= len(self._ending):
                    given = self._ending[-self._left]
                    pieces.append(b"$%d\r\n%b\r\n" % (len(given), given))
                else:
                    pieces.append(b"$%d\r\n" % size)
            until = min(len(self._data), self._at + self._bulk)
            self._bulk -= until - self._at
            if self._left > len(self._ending):
                pieces.append(memoryview(self._data)[self._at : until])
            self._at = until
            if not self._bulk:
                self._left -= 1
        return pieces if self._passes else []

    def head(self) -> Head | None:
        """The next command to decide on; None: more bytes are needed. Raises NotACommand."""
        if self._left:
            return None
        while self._head is None:
            if not self._count:
                count = self._length(b"*")
                if count is None:
                    return None
                if not 0 < count <= MOST_ARGUMENTS:
                    raise NotACommand(f"a command has 1 to {MOST_ARGUMENTS} arguments, not {count}")
                self._count, self._held, self._total = count, 0, 0
            elif not self._read_argument():
                return None
        return self._head

    def accept(self, ending: tuple[bytes, ...] = ()) -> list[Piece]:
        """Let the command of `head` pass; returns what is to be sent of it by now.

        Args:
            ending: passes in the place of the command's last arguments, whatever was sent there.
        """
        self._ending = ending
        head = self._decided(passes=True)
        pieces = [b"*%d\r\n" % head.count, *(b"$%d\r\n%b\r\n" % (len(each), each) for each in head.arguments)]
        return [b"".join(pieces), *self.rest()]

    def skip(self) -> None:
        """Drop the command of `head`, and what is still to come of it."""
        self._decided(passes=False)
        self.rest()

    def _decided(self, passes: bool) -> Head:
        assert self._head is not None
        head, self._head = self._head, None
        self._left, self._passes = head.count - len(head.arguments), passes
        if self._size >= 0:  # the argument that is too long to be held has begun
            self._bulk = self._size + 2
        self._count, self._arguments, self._held, self._size = 0, [], 0, -1
        return head

    def _read_argument(self) -> bool:
        """Read the next argument of the command; False if more bytes are needed."""
        if self._size < 0:
            size = self._length(b"$")
            if size is None:
                return False
            self._add(size)
            self._size = size
            self._held += size + _OVERHEAD
            is_call = bool(self._arguments) and self._arguments[0].upper() == b"EVALSHA"
            if self._held > (CALL_BYTES if is_call else HELD_BYTES):
                self._head = Head(tuple(self._arguments), self._count)
                return True
        end = self._at + self._size
        if len(self._data) < end + 2:
            return False
        if self._data[end : end + 2] != b"\r\n":
            raise NotACommand("an argument has another length than it was said to have")
        self._arguments.append(self._data[self._at : end])
        self._at, self._size = end + 2, -1
        if len(self._arguments) == self._count or self._is_enough(self._arguments):
            self._head = Head(tuple(self._arguments), self._count)
        return True

    def _add(self, size: int) -> None:
        self._total += size
        if self._total > COMMAND_BYTES:
            raise NotACommand(f"a command has at most {COMMAND_BYTES >> 20} MiB")

    def _length(self, kind: bytes) -> int | None:
        """The number in the next line, which begins with `kind`; None: the line is incomplete. Raises NotACommand."""
        end = self._data.find(b"\r\n", self._at, self._at + LONGEST_LINE)
        line = self._data[self._at : end if end >= 0 else self._at + LONGEST_LINE]
        if line[:1] not in (b"", kind) or (end < 0 and len(line) == LONGEST_LINE):
            raise NotACommand("commands are arrays of bulk strings (RESP)")
        if end < 0:
            return None
        if not _NUMBER.fullmatch(line, 1):
            raise NotACommand("a length is a number")
        self._at = end + 2
        return int(line[1:])
