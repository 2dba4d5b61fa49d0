"""Lets those of a machine's commands pass that it may send, and puts an error in the place of each other."""

import asyncio
from collections.abc import Callable

from api.gateway.commands import policy, scripts
from api.gateway.commands.access import Access
from api.gateway.commands.parser import Commands, Head, Piece
from api.gateway.commands.policy import Needs
from api.gateway.commands.scripts import NotPermitted
from computeshare.errors import ComputeShareError
from computeshare.types import plain

REFUSED = "REFUSED"
"""A command that no broker knows: its error holds the reason, and comes in the place of the refused command's reply."""


class TooManyRefused(ComputeShareError):
    """A machine sent so many commands that it may not send that it is cut off."""


class CommandFilter:
    """Filters the commands of one connection.

    Args:
        machine: the machine's id.
        refused: is told of each refused command, with the reason, and may raise.
    """

    def __init__(self, machine: str, access: Access, refused: Callable[[str], None]) -> None:
        self._machine, self._access, self._refused = machine, access, refused
        self._commands = Commands(policy.is_enough)

    async def passed(self, data: bytes) -> list[Piece]:
        """What is to be sent to the broker, now that these bytes have come from the machine.

        Raises NotACommand, what `refused` raises, and errors of the broker.
        """
        commands = self._commands
        commands.push(data)
        pieces = commands.rest()
        while (head := commands.head()) is not None:
            if (reason := await self._refusal(head)) is None:
                pieces += commands.accept()
            else:
                self._refused(reason)
                pieces.append(replacement(reason))
                commands.skip()
                commands.rest()
        return pieces

    async def _refusal(self, head: Head) -> str | None:
        """Why a command is refused; None: it may pass."""
        try:
            needs = needed(head)
        except NotPermitted as error:
            return str(error)
        if needs == Needs() or self._access.known(self._machine, needs):
            return None
        reason = await asyncio.to_thread(self._access.refusal, self._machine, needs)
        return reason and f"{_shown(head)}: {reason}"


def needed(head: Head) -> Needs:
    """What a command presumes. Raises NotPermitted: no machine may send it."""
    name = head.arguments[0].upper() if head.arguments else b""
    if head.is_complete and name == b"EVALSHA":
        return scripts.needs_of_call(head.arguments)
    if head.is_complete and name == b"SCRIPT" and len(head.arguments) == 3 and head.arguments[1].upper() == b"LOAD":
        return scripts.needs_of_load(head.arguments[2])
    needs = policy.needs(head.arguments, head.count) if head.arguments else None
    if needs is None:
        raise NotPermitted(f"{_shown(head)}: machines may not send this")
    return needs


def replacement(reason: str) -> bytes:
    """The command that stands in for a refused one."""
    text = reason.encode("ascii", "replace")[:120]
    return b"*2\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(REFUSED), REFUSED.encode(), len(text), text)


def _shown(head: Head) -> str:
    """A command's name and first argument, for messages."""
    return plain(b" ".join(each[:60] for each in head.arguments[:2]).decode(errors="replace")) or "a command"
