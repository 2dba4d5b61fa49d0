"""Several commands in one exchange, the calls of scripts and large values among them."""

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
"""Bytes of a message from which another command takes what follows."""
AT_ONCE_BYTES = 4 << 20
"""Messages up to which all goes in one exchange; larger ones are staged part by part before."""
Messages = Mapping[str, Message]
"""Messages by their keys; a part that is None is there already."""


class Channel:
    """Exchanges several commands at a time over connections of its own, in one thread, with large values among them.

    An outage of the broker is waited out as `redis` would. Commands may be sent twice then, so they must bear that.
    """

    def __init__(self, redis: Redis, wires: Wires | None = None) -> None:
        self._wires = wires or Wires.to(redis)
        self._retry: Any = redis.get_retry()
        self._scripts = Scripts(redis)
        self._following: Sequence[Command] = ()

    def exchange(
        self,
        commands: Sequence[Command],
        into: Sequence[Buffer | None] | None = None,
        following: Sequence[Command] = (),
        meanwhile: Callable[[], object] | None = None,
        large: bool | None = None,
        raise_errors: bool = True,
    ) -> list[Any]:
        """The replies, in order. Raises what `Wire.exchange` does, but for an outage that ends in time.

        Args:
            into, raise_errors: as for `Wire.exchange`.
            large: whether the values are, where nothing follows; by default those that go `into` memory are.
            following: commands that are sent with these, whose replies `rest` waits for.
            meanwhile: as for `Wire.exchange`; called again where all is sent again.
        """
        self._following = following
        wire = self._wires.large if large or (large is None and into) else self._wires.short
        try:
            return self._exchange(wire, commands, into, meanwhile, raise_errors)
        except NoScriptError:
            self._scripts.load_again()
            return self._exchange(wire, commands, into, meanwhile, raise_errors)

    def fetch(self, commands: Sequence[Command], into: Sequence[Buffer | None], large: bool | None = None) -> list[Any]:
        """As `exchange`, for values whose writer is not trusted: one that does not fit into its memory is dropped as
        it comes, with a CodecError in its place.
        """
        replies = self.exchange(commands, into, large=large, raise_errors=False)
        for reply in replies:
            if isinstance(reply, Exception) and not isinstance(reply, CodecError):
                raise reply
        return replies

    def rest(self) -> list[Any]:
        """The replies to what followed the exchange before, which is sent again if the broker was away since."""
        try:
            return self._wires.short.rest()
        except (NoScriptError, RedisConnectionError, RedisTimeoutError):
            return self.exchange(self._following)

    def script(self, name: str, job: JobKeys, **values: Any) -> Command:
        """The command that runs a script, see `Scripts.call`."""
        return self._scripts.command(name, job, **values)

    def stage(self, messages: Mapping[str, Iterable[Blob | None]], life_s: int, before: Sequence[str] = ()) -> None:
        """Put messages under their keys, some MB at a time; they expire `life_s` seconds after the last part came.

        A part is asked for when it is about to be sent.

        Args:
            before: keys of messages that were staged before and are to live as long as these.
        """
        done = [*before]
        for key, parts in messages.items():
            for command in staging(key, parts, life_s):
                others: list[Command] = [["EXPIRE", other, life_s] for other in done]
                self.exchange([command, *others], large=True)
            done.append(key)

    def run_staged(
        self,
        messages: Messages,
        life_s: int,
        script: Command,
        *others: Command,
        before: Sequence[str] = (),
        following: Sequence[Command] = (),
        meanwhile: Callable[[], object] | None = None,
    ) -> list[Any]:
        """Put messages under their keys and run the script that makes use of them: its reply, then those of `others`.

        `before` is as for `stage`, `following` and `meanwhile` as for `exchange`.

        Small ones go with the script in one transaction, of which a broker that has no memory for a part does nothing;
        large ones are staged before. So the script never meets half of one.
        """
        if sum(len(part) for parts in messages.values() for part in parts if part is not None) > AT_ONCE_BYTES:
            self.stage(messages, life_s, before)
            messages = {}
        staged = [command for key, parts in messages.items() for command in staging(key, parts, life_s)]
        block: list[Command] = [["MULTI"], *staged, script, ["EXEC"]]
        replies = self.exchange([*block, *others], following=following, meanwhile=meanwhile)
        return [replies[len(block) - 1][-1], *replies[len(block) :]]

    def read(
        self, key: str, parts: int, into: Sequence[Blob] | None = None, others: Sequence[Command] = ()
    ) -> tuple[list[Blob] | None, list[Any]]:
        """So many parts of the message under a key, None if it has not as many, and the replies to `others`.

        Args:
            into: memory for each part, of which what is returned are views. They are asked for one by one then, not
                all at a time: a broker that holds all of a large message beside its copy of it takes twice as long.
        """
        if into is None:
            found, *replies = self.exchange([["HMGET", key, *range(parts)], *others])
        else:
            commands: list[Command] = [["HGET", key, part] for part in range(parts)]
            replies = self.exchange([*commands, *others], [*into, *[None] * len(others)])
            found, replies = replies[:parts], replies[parts:]
        return None if None in found else found, replies

    def load(self, key: str) -> list[memoryview] | None:
        """All parts of the message under a key; None if it is gone."""
        found = self._load(key)
        return found and found[1]

    def load_sealed(self, key: str) -> memoryview | None:
        """The parts of a message that was sealed, one after another, in memory of their own that can be written to;
        None if it is gone.

        They are received there: joining them would hold the interpreter, and every other thread with it, for seconds
        where they are large. Raises CodecError: they were damaged.
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
            return wire.exchange(commands, into, raise_errors, self._following, meanwhile)

        if self._retry is None:
            return exchange()
        replies: list[Any] = self._retry.call_with_retry(exchange, lambda error: None)
        return replies


def pairs(reply: dict[Any, Any] | list[Any]) -> list[tuple[Any, Any]]:
    """A map as it comes by RESP3, or by RESP2 as a list."""
    return [*reply.items()] if isinstance(reply, dict) else [*zip(reply[::2], reply[1::2], strict=True)]


def staging(key: str, parts: Iterable[Blob | None], life_s: int) -> Iterator[Command]:
    """The commands that put a message under a key, some MB each; it expires `life_s` seconds after the last of them.

    A part that is None is there already; in a message without any, what else lies there is let go of.
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
