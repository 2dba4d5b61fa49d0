"""Blobs to and from the broker: many commands in one go, large values neither copied nor joined.

redis-py opens the connection (address, password, TLS, database, patience in connecting); what travels over it is
framed here.
"""

import fcntl
import select
import socket
import ssl
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from redis import Redis
from redis.exceptions import BusyLoadingError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from computeshare.errors import Interrupted
from computeshare.transport.commands import Blob, Command, Outgoing, as_view
from computeshare.transport.rate_limit import Pacer
from computeshare.transport.resp import Replies

STALL_S = 10.0
"""Seconds without a byte moved after which a link counts as broken, where the client has no timeout of its own."""
ROOM_BYTES = 1 << 22
"""What a unix socket may hold each way, so that few changes of process move a large value; systems grant less (Linux
`net.core.wmem_max`) and by default little: 200 kB, macOS 8.
"""
_LOOK_S = 0.5
_WANTS = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_SO_NWRITE = 0x1024  # macOS: bytes that the other side has not confirmed


class Wire:
    """A connection to the broker of its own, for one thread.

    Args:
        client: whose connections are made; `decode_responses` does not apply, replies are bytes.
        stall_s: how long nothing may move, in seconds, by default the client's `socket_timeout`; the whole may take
            as long as it likes.
        pacer: what keeps the bytes sent to a rate, shared between wires if need be.
        interrupt: asked twice a second and more; once it says True, the exchange that is under way is given up.
    """

    def __init__(
        self,
        client: Redis,
        stall_s: float | None = None,
        pacer: Pacer | None = None,
        interrupt: Callable[[], bool] | None = None,
    ) -> None:
        pool: Any = client.connection_pool
        self._connection = pool.connection_class(**pool.connection_kwargs)  # one that the pool does not count
        self._stall_s: float = stall_s or pool.connection_kwargs.get("socket_timeout") or STALL_S
        self._pacer = pacer
        self._interrupt = interrupt
        self._link: socket.socket | None = None
        self._replies = Replies()
        self._outgoing: Outgoing | None = None  # of which replies are still to be taken
        self._allowed_bytes = 0
        self._allowed_at = 0.0
        self.bytes_sent = self.bytes_received = 0
        """Over all its connections, framing included."""

    def exchange(
        self,
        commands: Sequence[Command],
        into: Sequence[Blob | None] | None = None,
        raise_errors: bool = True,
        following: Sequence[Command] = (),
        meanwhile: Callable[[], object] | None = None,
    ) -> list[Any]:
        """Send commands and receive their replies, both at a time.

        Args:
            commands: each a name and its arguments: text, numbers, bytes, or anything contiguous that holds bytes.
            into: for each command None, or a writable buffer into which the strings of its reply are received, one
                after another; they are views of it in the reply. One that does not fit is a CodecError in its place.
            raise_errors: whether to raise the first error among the replies, nested ones included, after the last of
                them was received; else they are exceptions in their places. A broker that a script keeps busy is
                always raised.
            following: commands that are sent with these; `rest` waits for their replies, another exchange does without.
            meanwhile: called once all is sent, before replies are waited for.
        Returns: a reply for each command: bytes, int, None, list; with RESP3 also float, bool, dict.
        Raises:
            redis.exceptions.ResponseError and its kin, CodecError: as above; the connection goes on.
            redis.exceptions.TimeoutError: nothing moved for `stall_s`. redis.exceptions.ConnectionError: the broker is
                gone. Interrupted. After each of these the next exchange opens a connection anew; what the broker has
                done of this one is not known.
        """
        buffers = [None if each is None else as_view(each) for each in into or [None] * len(commands)]
        buffers += [None] * len(following)
        outgoing = Outgoing([*commands, *following], [len(each or b"") for each in buffers])
        with self._closing():
            self._ready()
            self._replies.expect(buffers)
        return self._taken(outgoing, len(commands), raise_errors, meanwhile)

    def rest(self) -> list[Any]:
        """The replies to the commands that followed those of the exchange before; raises what that does."""
        if self._outgoing is None:
            raise RedisConnectionError("the connection to the broker broke since the commands were sent")
        return self._taken(self._outgoing, self._replies.expected, True)

    def close(self) -> None:
        """Let the connection go; another exchange would open one."""
        self._link = self._outgoing = None
        self._allowed_bytes = 0
        self._connection.disconnect()

    def _taken(
        self, outgoing: Outgoing, count: int, raise_errors: bool, meanwhile: Callable[[], object] | None = None
    ) -> list[Any]:
        """The next so many replies, once they are there; the others are left for `rest`."""
        with self._closing():
            self._transfer(outgoing, self._replies.expected - count, meanwhile)
        replies, error = self._replies.take(count)
        self._outgoing = outgoing if self._replies.expected else None
        if outgoing.left and self._outgoing is None:  # the broker has answered all of it, and listens no more
            self.close()
        if error and (raise_errors or isinstance(error, BusyLoadingError)):
            if self._outgoing:  # nobody will ask for what follows
                self.close()
            raise error
        return replies

    @contextmanager
    def _closing(self) -> Iterator[None]:
        """Let the connection go if what is done with it fails."""
        try:
            yield
        except OSError as cause:
            self.close()
            raise RedisConnectionError(f"the connection to the broker broke: {cause}") from cause
        except BaseException:
            self.close()
            raise

    def _ready(self) -> None:
        """See to it that there is a connection that the broker has not ended, and that owes nothing."""
        if self._link is not None and (self._outgoing or not self._in_step(self._link)):
            self.close()
        if self._link is None:
            self._connection.connect()
            self._link = self._connection._get_socket()
            assert self._link is not None
            self._link.setblocking(False)
            _widen(self._link)
            self._replies = Replies()

    def _in_step(self, link: socket.socket) -> bool:
        """Whether the connection is up and nothing has come that was not asked for, but pushes."""
        try:
            self._receive(link)
        except OSError:
            return False
        return self._replies.waiting[:1] in (b"", b">")

    def _transfer(self, outgoing: Outgoing, later: int, meanwhile: Callable[[], object] | None) -> None:
        """Send and receive until all replies but the last `later` are there."""
        link = self._link
        assert link is not None
        watch = _Watch(link, self._stall_s)
        while (missing := self._replies.missing) > later:
            if self._interrupt is not None and self._interrupt():
                raise Interrupted("the transfer was given up")
            moved = self._send(link, outgoing)
            if meanwhile and not outgoing.left:
                meanwhile()
                meanwhile = None
            if self._replies.missing > later:  # else they came while sending, and perhaps the connection's end after
                moved += self._receive(link)
            if moved:
                watch.moved()
                outgoing.answered(missing - self._replies.missing)
            elif self._replies.missing > later:
                watch.wait(writing=outgoing.ready > 0, not_before=self._allowed_at)

    def _send(self, link: socket.socket, outgoing: Outgoing) -> int:
        """Send what may be sent and fits into the link now; how many bytes that was."""
        pieces = outgoing.head(self._allowance(outgoing.ready))
        if not pieces:
            return 0
        try:
            sent = link.send(pieces[0]) if isinstance(link, ssl.SSLSocket) else link.sendmsg(pieces)
        except _WANTS:
            return 0
        except OSError:
            if not self._receive(link):  # what the broker said before it ended the connection
                raise
            return 0
        outgoing.sent(sent)
        self._allowed_bytes -= sent
        self.bytes_sent += sent
        return sent

    def _allowance(self, ready: int) -> int:
        """How many of the bytes that are ready may be sent now."""
        if self._pacer is None or not ready:
            return ready
        if not self._allowed_bytes:
            self._allowed_bytes, self._allowed_at = self._pacer.reserve(ready)
        return self._allowed_bytes if self._pacer.clock() >= self._allowed_at else 0

    def _receive(self, link: socket.socket) -> int:
        """Receive what is there; how many bytes that was. Raises OSError: the other side has ended the connection."""
        try:
            count = link.recv_into(self._replies.space())
        except _WANTS:
            return 0
        if not count:
            raise ConnectionResetError("it was closed by the other side")
        self._replies.received(count)
        self.bytes_received += count
        return count


@dataclass(frozen=True, slots=True)
class Wires:
    """One thread's connections to the broker: for short exchanges, and for large values; they may be one and the same.

    On one machine TCP is the quicker for what fits into a few hundred kB, a unix socket for what does not.
    """

    short: Wire
    large: Wire

    @classmethod
    def to(cls, client: Redis, near: Redis | None = None, **options: Any) -> "Wires":
        """Wires as `Wire` makes them from `client`; the short one from `near`, if that is another."""
        large = Wire(client, **options)
        return cls(large if near in (None, client) else Wire(near, **options), large)

    @property
    def bytes_sent(self) -> int:
        return sum(wire.bytes_sent for wire in {self.short, self.large})

    @property
    def bytes_received(self) -> int:
        return sum(wire.bytes_received for wire in {self.short, self.large})


class _Watch:
    """Waits for a link, until nothing has moved on it for `stall_s` seconds.

    Bytes leave the machine long after they were handed over: as long as the other side confirms some, nothing stalls.
    """

    def __init__(self, link: socket.socket, stall_s: float) -> None:
        self._link, self._stall_s = link, stall_s
        self._poll = select.poll()
        self._moved_at = time.monotonic()
        self._queued = 0

    def moved(self) -> None:
        self._moved_at = time.monotonic()

    def wait(self, writing: bool, not_before: float) -> None:
        """Return when something may have changed, or it is time to look; writing waits for `not_before`.

        Raises: RedisTimeoutError: nothing has moved for too long.
        """
        now = time.monotonic()
        held_s = max(0.0, not_before - now) if writing else 0.0
        if held_s or self._confirmed():
            self._moved_at = now
        left_s = self._moved_at + self._stall_s - now
        if left_s <= 0:
            raise RedisTimeoutError(f"nothing moved between here and the broker for {self._stall_s:g} seconds")
        self._poll.register(self._link, select.POLLIN | (select.POLLOUT if writing and not held_s else 0))
        self._poll.poll(1000 * min(_LOOK_S, left_s, held_s or left_s))

    def _confirmed(self) -> bool:
        """Whether the other side has confirmed bytes since this was last asked."""
        before, self._queued = self._queued, unconfirmed_bytes(self._link)
        return self._queued < before


def _widen(link: socket.socket) -> None:
    """Give a unix socket its room; what goes over a network is left to the system, which measures what that takes."""
    if link.family == socket.AF_UNIX:
        for way in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with suppress(OSError):  # macOS refuses what is above its limit
                link.setsockopt(socket.SOL_SOCKET, way, ROOM_BYTES)


def unconfirmed_bytes(link: socket.socket) -> int:
    """How many bytes handed to the system have not reached the other side's; 0 where the system does not tell."""
    try:
        if sys.platform == "darwin":
            return link.getsockopt(socket.SOL_SOCKET, _SO_NWRITE)
        return int(struct.unpack("i", fcntl.ioctl(link, termios.TIOCOUTQ, b"\0\0\0\0"))[0])
    except OSError:
        return 0
