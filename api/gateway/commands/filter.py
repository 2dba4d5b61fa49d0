"""Lets those of a machine's commands pass that it may send, and puts an error in the place of each other."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial

from api.gateway.commands import policy, scripts
from api.gateway.commands.access import Access
from api.gateway.commands.holdings import Holdings
from api.gateway.commands.parser import Commands, Head, Piece
from api.gateway.commands.policy import ADDING, CommandNeeds, Own
from api.gateway.commands.rates import CommandRates
from api.gateway.commands.replies import MOST_OF_ONE, AwaitedReplies
from api.gateway.commands.scripts import NotPermitted
from computeshare.errors import ComputeShareError
from computeshare.queue.rq_keys import WORKERS
from computeshare.transport.refusals import REFUSED
from computeshare.types import plain


class TooManyRefused(ComputeShareError):
    """A machine sent so many commands that it may not send that it is cut off."""


class TooMuchUnfinished(ComputeShareError):
    """A machine has begun more large commands than the broker should hold, and ended none."""


ARGUMENT_BYTES = 64
"""Of the broker's memory that an argument takes beyond its own, about."""
UNFINISHED_BYTES = 1 << 28
"""The most bytes of commands that a machine has begun and not ended, over all its connections."""
MOST_ASKED = MOST_OF_ONE
"""Parts that one transaction may ask for, which are all sent at its end."""


class CommandFilter:
    """Filters the commands of one connection.

    Args:
        machine: the machine's id.
        refused: is told of each refused command, with the reason, and may raise.
        replies: those that the machine still awaits.
        unfinished: bytes of unfinished commands by machine, for all connections.
        rates: how often machines call scripts.
        holdings: what machines hold in the broker.
    """

    def __init__(
        self,
        machine: str,
        access: Access,
        refused: Callable[[str], None],
        replies: AwaitedReplies,
        unfinished: Counter[str],
        rates: CommandRates,
        holdings: Holdings,
    ) -> None:
        self._rates, self._holdings = rates, holdings
        self._machine, self._access, self._refused = machine, access, refused
        self.replies, self._unfinished = replies, unfinished
        self._commands = Commands(policy.is_enough)
        self._begun = 0  # of `unfinished`, on this connection
        self._asked: int | None = None  # parts that a transaction asks for at its end; None: there is none
        self._written: list[str] = []  # keys that the transaction writes
        self._channel = b""  # the only one to which this connection may listen
        self._growing, self._grown = "", 0  # the key of a command that is still to come in part; its bytes so far

    async def passed(self, data: bytes) -> AsyncIterator[list[Piece]]:
        """Yield the pieces to send to the broker, now that these bytes have come from the machine.

        Waits, before a command that asks for much, until the machine has taken the replies that it asked for before;
        and where the machine calls scripts too fast.
        Raises NotACommand, TooMuchUnfinished, what `refused` raises, and errors of the broker.
        """
        commands = self._commands
        commands.push(data)
        pieces = commands.rest()
        self._note_grown()
        while (head := commands.head()) is not None:
            name = head.arguments[0].upper() if head.arguments else b""
            reason, parts = await self._refusal(head), 0
            if reason is None:
                reason, parts = self._asks(name, head)
            calls = reason is None and name == b"EVALSHA"
            if not self.replies.has_room(parts) or (calls and not self._rates.has_room(self._machine)):
                yield pieces
                pieces = []
                await self.replies.room(parts)
            if calls:
                await self._rates.room(self._machine)
            written = [] if reason else self._begin(name, head)
            then = partial(self._holdings.end, self._machine, written)
            self.replies.sent(parts, name in (b"SUBSCRIBE", b"UNSUBSCRIBE"), then)
            if (instead := await self._instead(head, reason)) is None:
                pieces += commands.accept(policy.ending(head.arguments))
                self._note_grown()
            else:
                pieces.append(instead)
                commands.skip()
                commands.rest()
        self._note_unfinished()
        yield pieces

    def _begin(self, name: bytes, head: Head) -> list[str]:
        """Note that a command passes. Returns the keys of the machine's own that are written once its reply has come:
        those of a transaction, at its end.
        """
        for key, own in _own_keys(head):
            self._holdings.begin(self._machine, key, own)
            self._written.append(key)
            if name in ADDING:
                self._growing, self._grown = key, -ARGUMENT_BYTES * head.count
        if scripts.name_of(head.arguments) == "extend":
            self._holdings.keep(self._machine, [each.decode() for each in head.arguments[3:]])
        if self._asked is not None:  # within a transaction
            return []
        written, self._written = self._written, []
        return written

    def _note_grown(self) -> None:
        """Count what has passed of a command's value since the last time."""
        if self._growing:
            total = self._commands.total_bytes
            self._holdings.add(self._machine, self._growing, total - self._grown)
            self._grown = total
        if not self._commands.unfinished_bytes:
            self._growing = ""

    async def _instead(self, head: Head, reason: str | None) -> bytes | None:
        """The command that the broker gets in the place of a refused one, of one whose answer would tell where the
        broker is, or of one that adds to RQ's list of all workers, which only RQ's own tools read; None: itself.
        """
        if reason is not None:
            self._refused(reason)
            return replacement(reason)
        if head.arguments[0].upper() == b"SADD" and head.arguments[1] == WORKERS.encode():
            return framed(b"ECHO", b"")
        asked = tuple(each.upper() for each in head.arguments[:2])
        if asked == (b"CLIENT", b"INFO"):
            return framed(b"ECHO", b"id=0 addr=gateway:0")
        if asked == (b"INFO", b"SERVER"):
            return framed(b"ECHO", await asyncio.to_thread(self._access.versions))
        return None

    def close(self) -> None:
        """Forget what has begun: the connection ends."""
        self._unfinished[self._machine] -= self._begun
        self._begun = 0
        self.replies.close()
        self._holdings.end(self._machine, self._written)
        self._written = []

    def _asks(self, name: bytes, head: Head) -> tuple[str | None, int]:
        """Why a command asks for too much, and the parts in the reply to it: in a transaction, all come at its end."""
        parts = policy.parts_asked(head.arguments)
        if name in (b"EXEC", b"DISCARD"):
            found, self._asked = self._asked or 0, None
            return None, found if name == b"EXEC" else 0
        if name == b"SUBSCRIBE":
            self._channel = self._channel or head.arguments[1]
            if self._channel != head.arguments[1]:  # UNSUBSCRIBE would have several replies
                return f"{_shown(head)}: a connection listens to one channel", 0
        if name == b"MULTI":
            self._asked = self._asked or 0
        elif self._asked is not None:
            if self._asked + parts > MOST_ASKED:
                return f"{_shown(head)}: this transaction asks for too much", 0
            self._asked += parts
        return None, parts

    def _note_unfinished(self) -> None:
        begun = self._commands.unfinished_bytes
        self._unfinished[self._machine] += begun - self._begun
        self._begun = begun
        if self._unfinished[self._machine] > UNFINISHED_BYTES:
            raise TooMuchUnfinished("this machine has begun too many large commands at a time")

    async def _refusal(self, head: Head) -> str | None:
        """Why a command is refused; None: it may pass."""
        try:
            needs = needed(head)
        except NotPermitted as error:
            return str(error)
        reason = None
        if needs != CommandNeeds() and not self._access.known(self._machine, needs):
            reason = await asyncio.to_thread(self._access.refusal, self._machine, needs)
        if reason is None:
            return await self._lack_of_room(head)
        return f"{_shown(head)}: {reason}"

    async def _lack_of_room(self, head: Head) -> str | None:
        """Why a permitted command must wait; None: it need not."""
        if too_often := self._rates.refusal(self._machine, scripts.name_of(head.arguments)):
            return too_often
        if head.arguments[0].upper() in ADDING:
            for _, own in _own_keys(head):
                if not self._holdings.has_room(self._machine, own.is_message):
                    return await asyncio.to_thread(self._holdings.refusal, self._machine, own.is_message)
        return None


def needed(head: Head) -> CommandNeeds:
    """The needs of a command. Raises NotPermitted: no machine may send it."""
    name = head.arguments[0].upper() if head.arguments else b""
    if head.is_complete and name == b"EVALSHA":
        return scripts.needs_of_call(head.arguments)
    if head.is_complete and name == b"SCRIPT" and len(head.arguments) == 3 and head.arguments[1].upper() == b"LOAD":
        return scripts.needs_of_load(head.arguments[2])
    needs = policy.needs(head.arguments, head.count) if head.arguments else None
    if needs is None:
        raise NotPermitted(f"{_shown(head)}: machines may not send this")
    return needs


def _own_keys(head: Head) -> list[tuple[str, Own]]:
    """The keys of the machine's own that a permitted command writes or expires."""
    found = policy.own_key(head.arguments)
    return [found] if found else []


def replacement(reason: str) -> bytes:
    """The command that stands in for a refused one."""
    return framed(REFUSED.encode(), reason.encode("ascii", "replace")[:120])


def framed(name: bytes, text: bytes) -> bytes:
    """A command with one argument, in RESP."""
    return b"*2\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(name), name, len(text), text)


def _shown(head: Head) -> str:
    """A command's name and first argument, for messages."""
    return plain(b" ".join(each[:60] for each in head.arguments[:2]).decode(errors="replace")) or "a command"
