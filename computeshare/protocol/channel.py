"""Sends several Redis commands in one exchange, including script calls and large values."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError
from redis.exceptions import TimeoutError as RedisTimeoutError
from typing_extensions import Buffer

from computeshare.codecs.messages import unseal
from computeshare.errors import CodecError
from computeshare.protocol.keys import JobKeys
from computeshare.protocol.scripts import Scripts
from computeshare.transport.commands import Argument, Command
from computeshare.transport.wire import Wire, Wires
from computeshare.types import Blob, Message

LARGE = 1 << 20
"""Bytes of a message that one command stages; further parts go into another command."""
AT_ONCE_BYTES = 4 << 20
"""Total bytes of messages that go into one exchange with their script; larger messages are staged beforehand."""
Messages = Mapping[str, Message]
"""Key to message; a part that is None was staged earlier."""


class Channel:
    """Exchanges batches of commands with the broker over connections of its own, from one thread.

    During an outage of the broker it retries by the retry policy of `redis`. Retries may send commands twice, so every
    command must be safe to repeat.
    """

    def __init__(self, redis: Redis, wires: Wires | None = None) -> None:
        self._wires = wires or Wires.to(redis)
        self._retry: Any = redis.get_retry()
        self._scripts = Scripts(redis)
        self._pipelined: Sequence[Command] = ()

    def exchange(
        self,
        commands: Sequence[Command],
        into: Sequence[Buffer | None] | None = None,
        pipelined: Sequence[Command] = (),
        meanwhile: Callable[[], object] | None = None,
        large: bool | None = None,
        raise_errors: bool = True,
    ) -> list[Any]:
        """Send commands and return their replies, in order.

        Raises the errors of `Wire.exchange`, except for an outage that ends before the retries do.

        Args:
            into, raise_errors: as for `Wire.exchange`.
            large: use the connection for large values; by default, if `into` is given.
            pipelined: commands to send with these; `pipelined_replies` returns their replies.
            meanwhile: as for `Wire.exchange`; called again on each retry.
        """
        self._pipelined = pipelined
        wire = self._wires.large if large or (large is None and into) else self._wires.short
        try:
            return self._exchange(wire, commands, into, meanwhile, raise_errors)
        except NoScriptError:
            self._scripts.load_again()
            return self._exchange(wire, commands, into, meanwhile, raise_errors)

    def fetch(self, commands: Sequence[Command], into: Sequence[Buffer | None], large: bool | None = None) -> list[Any]:
        """As `exchange`, for values from untrusted writers: a CodecError replaces a value too long for its buffer."""
        replies = self.exchange(commands, into, large=large, raise_errors=False)
        for reply in replies:
            if isinstance(reply, Exception) and not isinstance(reply, CodecError):
                raise reply
        return replies

    def pipelined_replies(self) -> list[Any]:
        """The replies to the `pipelined` commands of the last exchange; sends them again after an outage."""
        try:
            return self._wires.short.pipelined_replies()
        except (NoScriptError, RedisConnectionError, RedisTimeoutError):
            return self.exchange(self._pipelined)

    def script(self, name: str, job: JobKeys, **values: Any) -> Command:
        """The EVALSHA command for a script, see `Scripts.call`."""
        return self._scripts.command(name, job, **values)

    def stage(self, messages: Mapping[str, Iterable[Blob | None]], life_s: int, before: Sequence[str] = ()) -> None:
        """Store messages under their keys, about 1 MB a command. After the last command they stay for `life_s` seconds,
        or up to a quarter of that time less.

        Takes each part from its iterable only when it is about to be sent.

        Args:
            before: keys of messages staged earlier, whose expiry is extended with these.
        """
        done, extended = [*before], -math.inf
        for key, parts in messages.items():
            for command in staging(key, parts, life_s):
                others: list[Command] = []
                if time.monotonic() - extended > life_s / 4:  # not each time: a round may have thousands of messages
                    others, extended = [["EXPIRE", other, life_s] for other in done], time.monotonic()
                self.exchange([command, *others], large=True)
            done.append(key)

    def run_staged(
        self,
        messages: Messages,
        life_s: int,
        script: Command,
        *others: Command,
        before: Sequence[str] = (),
        pipelined: Sequence[Command] = (),
        meanwhile: Callable[[], object] | None = None,
    ) -> list[Any]:
        """Stage messages and run the script that uses them; returns the script's reply, then the replies to `others`.

        `before` is as for `stage`, `pipelined` and `meanwhile` as for `exchange`.

        Small messages go in one transaction with the script, which a broker short of memory rejects as a whole; large
        messages are staged beforehand. So the script never sees an incomplete message.
        """
        if sum(len(part) for parts in messages.values() for part in parts if part is not None) > AT_ONCE_BYTES:
            self.stage(messages, life_s, before)
            messages = {}
        staged = [command for key, parts in messages.items() for command in staging(key, parts, life_s)]
        block: list[Command] = [["MULTI"], *staged, script, ["EXEC"]]
        replies = self.exchange([*block, *others], pipelined=pipelined, meanwhile=meanwhile)
        return [replies[len(block) - 1][-1], *replies[len(block) :]]

    def read(
        self, key: str, parts: int, into: Sequence[Blob] | None = None, others: Sequence[Command] = ()
    ) -> tuple[list[Blob] | None, list[Any]]:
        """The first `parts` parts of the message under a key (None if any is missing), and the replies to `others`.

        Args:
            into: a buffer for each part; the returned parts are views of the buffers. Each part is then fetched by a
                command of its own: one reply with a whole large message takes the broker twice as long.
        """
        if into is None:
            found, *replies = self.exchange([["HMGET", key, *range(parts)], *others])
        else:
            commands: list[Command] = [["HGET", key, part] for part in range(parts)]
            replies = self.exchange([*commands, *others], [*into, *[None] * len(others)])
            found, replies = replies[:parts], replies[parts:]
        return None if None in found else found, replies

    def load(self, key: str) -> list[memoryview] | None:
        """All parts of the message under a key; None if the key is gone."""
        found = self._load(key)
        return found and found[1]

    def load_sealed(self, key: str) -> memoryview | None:
        """The content of a sealed message as one writable buffer; None if the key is gone.

        Receives the parts directly into that buffer: joining large parts would hold the interpreter lock for seconds.
        Raises CodecError: the message is damaged.
        """
        if (found := self._load(key)) is None:
            return None
        joined, parts = found
        unseal(parts)
        return joined[len(parts[0]) :]

    def _load(self, key: str) -> tuple[memoryview, list[memoryview]] | None:
        (count,) = self.exchange([["HLEN", key]])
        sizes = self.exchange([["HSTRLEN", key, part] for part in range(count)]) if count else []
        if not sizes or 0 in sizes:
            return None
        joined = np.empty(sum(sizes), np.uint8).data
        ends = [*accumulate(sizes)]
        parts = [joined[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        found = self.exchange([["HGET", key, part] for part in range(count)], parts)
        return None if None in found else (joined, parts)

    def _exchange(
        self,
        wire: Wire,
        commands: Sequence[Command],
        into: Sequence[Buffer | None] | None,
        meanwhile: Callable[[], object] | None,
        raise_errors: bool,
    ) -> list[Any]:
        def exchange() -> list[Any]:
            return wire.exchange(commands, into, raise_errors, self._pipelined, meanwhile)

        if self._retry is None:
            return exchange()
        replies: list[Any] = self._retry.call_with_retry(exchange, lambda error: None)
        return replies


def pairs(reply: dict[Any, Any] | list[Any]) -> list[tuple[Any, Any]]:
    """The items of a map reply: a dict in RESP3, a flat list in RESP2."""
    return [*reply.items()] if isinstance(reply, dict) else [*zip(reply[::2], reply[1::2], strict=True)]


def staging(key: str, parts: Iterable[Blob | None], life_s: int) -> Iterator[Command]:
    """The commands that store a message under a key, about 1 MB each; the key expires `life_s` seconds after the last.

    A part that is None was staged earlier. In a message without None, the first command deletes the key's old content.
    """
    if not (isinstance(parts, Sequence) and any(part is None for part in parts)):
        yield ["UNLINK", key]
    some: list[Argument] = []
    size = 0
    for index, part in enumerate(parts):
        if part is None:
            continue
        some += (index, part)
        size += len(part)
        if size >= LARGE:
            yield ["HSET", key, *some]
            yield ["EXPIRE", key, life_s]
            some, size = [], 0
    if some:
        yield ["HSET", key, *some]
    yield ["EXPIRE", key, life_s]
