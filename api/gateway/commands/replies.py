"""Bounds the replies that the broker holds for a machine: counts what was asked for and what the machine has taken.

The broker keeps what its clients do not read, without a limit, so that a few short commands could fill its memory.
"""

import asyncio
from collections import deque
from collections.abc import Callable

MOST_PARTS = 64
"""Parts of messages (at most 4 MiB each) that a machine may have asked for and not taken, over all its connections."""
MOST_OF_ONE = MOST_PARTS // 2
"""The most parts that one command counts for, so that a whole model can be read at once."""
MOST_COMMANDS = 20_000
"""Commands of one connection that may wait for the machine to take their replies."""
_LINE = 64
Then = Callable[[], None]


class Unread:
    """Parts that one machine has asked for and not taken."""

    def __init__(self) -> None:
        self.parts = 0
        self.changed = asyncio.Event()


class AwaitedReplies:
    """Replies that one connection still awaits, in order."""

    def __init__(self, unread: Unread) -> None:
        self._unread, self._stream = unread, ReplyStream()
        self._awaited: deque[tuple[int, bool, Then]] = deque()  # parts of each; whether it is about a channel

    def has_room(self, parts: int) -> bool:
        """Whether a command that asks for so many parts may be passed on now."""
        fits = not parts or self._unread.parts + min(parts, MOST_OF_ONE) <= MOST_PARTS
        return fits and len(self._awaited) < MOST_COMMANDS

    async def room(self, parts: int) -> None:
        """Wait until a command that asks for so many parts may be passed on."""
        while not self.has_room(parts):
            self._unread.changed.clear()
            await self._unread.changed.wait()

    def sent(self, parts: int, is_about_channel: bool = False, then: Then = lambda: None) -> None:
        """Note that a command is passed on; `then` is called once the machine has taken the reply, or the connection
        ends.
        """
        parts = min(parts, MOST_OF_ONE)
        self._unread.parts += parts
        self._awaited.append((parts, is_about_channel, then))

    def taken(self, data: bytes) -> None:
        """Note that the machine has taken these bytes of replies."""
        for is_push in self._stream.ended(data):
            if self._awaited and (not is_push or self._awaited[0][1]):
                parts, _, then = self._awaited.popleft()
                self._unread.parts -= parts
                then()
        self._unread.changed.set()

    def close(self) -> None:
        """Forget what is awaited: the connection ends."""
        while self._awaited:
            parts, _, then = self._awaited.popleft()
            self._unread.parts -= parts
            then()
        self._unread.changed.set()


class ReplyStream:
    """Finds where replies (RESP2 and RESP3) end, in bounded memory."""

    def __init__(self) -> None:
        self._line = b""
        self._skip = 0  # bytes of a string still to come
        self._left: list[int] = []  # elements still to come of each open aggregate
        self._kind = b""  # of the reply that is being read
        self._first: bytearray | None = None  # the first string of the reply, if it may say `message`

    def ended(self, data: bytes) -> list[bool]:
        """For each reply that ends within the next bytes, whether it is a push; messages of channels are left out."""
        found: list[bool] = []
        at = 0
        while at < len(data):
            if self._skip:
                until = min(len(data), at + self._skip)
                if self._first is not None and len(self._first) < 7:
                    self._first += data[at:until][: 7 - len(self._first)]
                self._skip -= until - at
                at = until
                if not self._skip:
                    self._end(found)
                continue
            end = data.find(b"\n", at)
            self._line = (self._line + data[at : end if end >= 0 else at + _LINE])[:_LINE]
            if end < 0:
                break
            line, self._line, at = self._line, b"", end + 1
            self._begin(line, found)
        return found

    def _begin(self, line: bytes, found: list[bool]) -> None:
        kind = line[:1]
        if not self._left:
            self._kind, self._first = kind, None
        size = int(line[1:]) if kind in b"$=!*~>%|" else 0
        if kind in b"$=!" and size >= 0:
            self._skip = size + 2
            if self._first is None and len(self._left) == 1 and self._kind in b"*>":
                self._first = bytearray(0 if size == 7 else 7)
        elif kind in b"*~>%|" and size > 0:
            self._left.append(size * (2 if kind in b"%|" else 1))
        else:
            self._end(found)

    def _end(self, found: list[bool]) -> None:
        while self._left:
            self._left[-1] -= 1
            if self._left[-1]:
                return
            self._left.pop()
        if self._kind != b"|" and bytes(self._first or b"") != b"message":
            found.append(self._kind == b">")
