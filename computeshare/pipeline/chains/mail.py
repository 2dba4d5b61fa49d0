"""Messages between the workers of a chain: one stream per session in the broker, read by that session alone.

A message belongs to an attempt at a micro-batch and names a stage and a tag. After an outage it may be sent twice, and
reading may be repeated: each sender numbers its messages, and the reader takes each number once. A chain's attempts
have rising numbers, their turns, by which outdated messages are told from those that are early.
"""

import itertools
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import structlog
from redis import Redis

from computeshare.errors import Interrupted
from computeshare.pipeline.chains.placement import MALFORMED, Held
from computeshare.protocol.channel import Channel, pairs
from computeshare.transport.commands import Command
from computeshare.transport.wire import Wires
from computeshare.types import Blob

LIFE_S = 120
"""Life of a session's unread messages, which its `Membership` extends."""
BLOCK_MS = 500
"""Longest single wait, after which it is asked whether to go on."""
ORDER, DONE, FAILED = "order", "done", "failed"
"""The tags of a leader's order, and of the answers to it."""
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Letter:
    """A message: of an attempt, about a stage."""

    attempt: str
    turn: int
    stage: int
    tag: str
    body: Blob


class LetterInbox:
    """A session's own messages, for one thread."""

    def __init__(self, redis: Redis, key: str, wires: Wires | None = None) -> None:
        """`key`: as `JobKeys.mail`."""
        self._channel, self._key = Channel(redis, wires), key
        self._last, self._turn = "0-0", 0
        self._numbers: dict[str, int] = {}
        """Of the newest message of each sender."""
        self._kept: dict[tuple[str, int, str], Letter] = {}

    def order(self, goes_on: Callable[[], bool]) -> Letter | None:
        """Wait for a leader's newest order, whose turn the caller begins; None: `goes_on` was false."""
        while goes_on():
            if orders := [letter for letter in self._kept.values() if letter.tag == ORDER]:
                newest = max(orders, key=lambda letter: letter.turn)
                self._kept.pop((newest.attempt, newest.stage, ORDER))
                return newest
            self._read()
        return None

    def next(self, goes_on: Callable[[], bool]) -> Letter | None:
        """Wait for the next message of any kind; None: `goes_on` was false."""
        while goes_on():
            if self._kept:
                return self._kept.pop(next(iter(self._kept)))
            self._read()
        return None

    def begin(self, turn: int) -> None:
        """Drop the messages of earlier turns."""
        self._turn = turn
        self._kept = {key: one for key, one in self._kept.items() if one.turn >= turn}

    def receive(self, attempt: str, stage: int, tag: str, goes_on: Callable[[], bool]) -> Blob:
        """Wait for a message of the attempt whose turn it is. Raises Interrupted: `goes_on` was false, another worker
        of the chain failed, or its leader has begun another attempt.
        """
        while (attempt, stage, tag) not in self._kept:
            kept = self._kept.values()
            if not goes_on() or any(one.tag == ORDER and one.turn > self._turn for one in kept):
                raise Interrupted("the work was called off")
            if any(one.tag == FAILED and one.attempt == attempt for one in kept):
                raise Interrupted("another worker of the chain cannot compute its stages")
            self._read()
        return self._kept.pop((attempt, stage, tag)).body

    def keep(self, letter: Letter) -> None:
        """Put a message among those that were read, unless it is outdated."""
        if letter.turn >= self._turn:
            self._kept[letter.attempt, letter.stage, letter.tag] = letter

    def close(self) -> None:
        """Delete unread messages."""
        self._channel.exchange([["UNLINK", self._key]])

    def _read(self) -> None:
        """Wait a little for the next message; those that were read are deleted from the broker."""
        trim: list[Command] = [["XTRIM", self._key, "MINID", _after(self._last)]] if self._last != "0-0" else []
        read: Command = ["XREAD", "COUNT", 1, "BLOCK", BLOCK_MS, "STREAMS", self._key, self._last]
        *_, reply = self._channel.exchange([*trim, read], large=True)
        if not reply:
            return
        entries = reply if isinstance(reply, list) else [*reply.items()]
        entry_id, fields = entries[0][1][-1]
        self._last = entry_id.decode()
        told: Mapping[bytes, Any] = dict(pairs(fields))
        if b"about" not in told:
            return
        try:
            about = json.loads(bytes(told[b"about"]))
            sender, number = about["sender"], int(about["number"])
            turn, stage = int(about["turn"]), int(about["stage"])
            if number > self._numbers.get(sender, 0):  # else it was sent again after an outage
                self.keep(Letter(about["attempt"], turn, stage, about["tag"], told[b"body"]))
                self._numbers[sender] = number
        except MALFORMED as error:  # whoever waits for it does so until the work is called off
            log.warning("a message between stages is malformed, and dropped", error=str(error)[:200])


class LetterOutbox:
    """Sends messages to other sessions, in order, from a thread of its own, while the caller computes."""

    def __init__(self, redis: Redis, key_of: Callable[[str], str], wires: Wires | None = None) -> None:
        """`key_of`: as `JobKeys.mail`."""
        self._channel, self._key_of = Channel(redis, wires), key_of
        self._name, self._numbers = uuid.uuid4().hex, itertools.count(1)
        self._helper = ThreadPoolExecutor(1, "mail")
        self._sending: list[Future[None]] = []
        self.bytes = 0

    def send(self, session: str, letter: Letter) -> None:
        """Queue a message. Raises the error of an earlier one."""
        self.settle(wait=False)
        self._sending.append(self._helper.submit(self._send, session, letter))

    def tell(self, session: str, letter: Letter) -> None:
        """Send a message, and wait until it was sent. Raises RedisError."""
        self._helper.submit(self._send, session, letter).result()

    def run(self, do: Callable[[Channel], None]) -> None:
        """Queue another exchange with the broker. Raises as `send`."""
        self.settle(wait=False)
        self._sending.append(self._helper.submit(do, self._channel))

    def settle(self, wait: bool = True) -> None:
        """Wait for all that was queued. Raises the first error: what was queued since has been sent all the same."""
        done, self._sending = (
            [one for one in self._sending if wait or one.done()],
            [one for one in self._sending if not (wait or one.done())],
        )
        for one in done:
            one.result()

    def drop(self) -> None:
        """Cancel what was not begun, wait for the rest, and ignore its errors: it is no longer wanted."""
        for one in self._sending:
            one.cancel()
        for one in self._sending:
            if not one.cancelled():
                one.exception()
        self._sending = []

    def _send(self, session: str, letter: Letter) -> None:
        key = self._key_of(session)
        about = {"attempt": letter.attempt, "turn": letter.turn, "stage": letter.stage, "tag": letter.tag}
        about |= {"sender": self._name, "number": next(self._numbers)}
        self.bytes += len(letter.body)
        self._channel.exchange(
            [["XADD", key, "*", "about", json.dumps(about), "body", letter.body], ["EXPIRE", key, LIFE_S]], large=True
        )


@dataclass(frozen=True, slots=True)
class ChainMail:
    """A `Mailbox` for one attempt at a micro-batch by a chain, as one of its sessions has it."""

    attempt: str
    turn: int
    chain: Sequence[Held]
    own: Held
    inbox: LetterInbox
    outbox: LetterOutbox
    goes_on: Callable[[], bool]

    def send(self, stage: int, tag: str, message: Blob) -> None:
        """Send to whoever holds a stage; returns before it is sent. Raises the error of an earlier message."""
        letter = Letter(self.attempt, self.turn, stage, tag, bytes(message))
        if stage in self.own.stages:
            self.inbox.keep(letter)
        else:
            self.outbox.send(next(one.session for one in self.chain if stage in one.stages), letter)

    def receive(self, stage: int, tag: str) -> Blob:
        """Wait for a message to a stage held here. Raises Interrupted, as `LetterInbox.receive`; the error of a message
        that was not sent, for which no answer would come.
        """

        def goes_on() -> bool:
            self.outbox.settle(wait=False)
            return self.goes_on()

        return self.inbox.receive(self.attempt, stage, tag, goes_on)


def wake(redis: Redis, key: str) -> None:
    """End the reader's current wait for a message under a key, without one. Raises RedisError."""
    with redis.pipeline() as block:
        block.xadd(key, {"wake": ""})
        block.expire(key, LIFE_S)
        block.execute()


def _after(entry_id: str) -> str:
    """The smallest id after this one."""
    ms, number = entry_id.split("-")
    return f"{ms}-{int(number) + 1}"
