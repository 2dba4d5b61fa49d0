"""Connections for large values: commands are pipelined, and large values are neither copied nor joined.

redis-py opens the connection (address, password, TLS, database, connect timeout); this module encodes and decodes the
traffic on it.
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
from computeshare.transport.resp import ReplyParser

STALL_S = 10.0
"""Seconds without traffic after which a connection counts as broken, if the client has no timeout of its own."""
ROOM_BYTES = 1 << 22
"""The buffer size to request for a unix socket, in each direction, so that a large value takes few context switches.

Systems grant less (Linux `net.core.wmem_max`), and their defaults are small: 200 kB, macOS 8 kB.
"""
_LOOK_S = 0.5
_WANTS = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_SO_NWRITE = 0x1024  # macOS: bytes that the other side has not confirmed


class Wire:
    """A separate connection to the broker, for one thread.

    Args:
        client: gives the connection's settings; `decode_responses` does not apply, replies are bytes.
        stall_s: most seconds without traffic, by default the client's `socket_timeout`; the total time is unlimited.
        pacer: limits the rate of sent bytes; wires may share it.
        interrupt: called at least twice a second; once it returns True, the current exchange is aborted.
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
        self._replies = ReplyParser()
        self._outgoing: Outgoing | None = None  # of which replies are still to be taken
        self._allowed_bytes = 0
        self._allowed_at = 0.0
        self.bytes_sent = self.bytes_received = 0
        """Totals of all connections of this wire, RESP framing included."""

    def exchange(
        self,
        commands: Sequence[Command],
        into: Sequence[Blob | None] | None = None,
        raise_errors: bool = True,
        pipelined: Sequence[Command] = (),
        meanwhile: Callable[[], object] | None = None,
    ) -> list[Any]:
        """Send commands and receive their replies, both at the same time.

        Args:
            commands: each a name and its arguments: text, numbers, bytes, or any contiguous buffer.
            into: for each command None, or a writable buffer that receives the strings of its reply one after another;
                in the reply they are views of it. A string that does not fit becomes a CodecError at its place.
            raise_errors: whether to raise the first error among the replies, nested ones included, after the last reply
                has arrived; else errors are exceptions at their places. A broker busy with a script always raises.
            pipelined: commands to send after these; `pipelined_replies` reads their replies, another exchange discards
                them.
            meanwhile: called once all is sent, before waiting for replies.
        Returns: a reply for each command: bytes, int, None, list; with RESP3 also float, bool, dict.
        Raises:
            redis.exceptions.ResponseError and its subclasses, CodecError: as above; the connection stays usable.
            redis.exceptions.TimeoutError: no traffic for `stall_s`. redis.exceptions.ConnectionError: the broker is
                gone. Interrupted. After each of these the next exchange opens a new connection; it is unknown which of
                this exchange's commands the broker has executed.
        """
        buffers = [None if each is None else as_view(each) for each in into or [None] * len(commands)]
        buffers += [None] * len(pipelined)
        outgoing = Outgoing([*commands, *pipelined], [len(each or b"") for each in buffers])
        with self._closing():
            self._ready()
            self._replies.expect(buffers)
        return self._taken(outgoing, len(commands), raise_errors, meanwhile)

    def pipelined_replies(self) -> list[Any]:
        """Read the replies to the previous exchange's `pipelined` commands. Raises the same errors as `exchange`."""
        if self._outgoing is None:
            raise RedisConnectionError("the connection to the broker broke after the commands were sent")
        return self._taken(self._outgoing, self._replies.expected, True)

    def close(self) -> None:
        """Close the connection; the next exchange opens a new one."""
        self._link = self._outgoing = None
        self._allowed_bytes = 0
        self._connection.disconnect()

    def _taken(
        self, outgoing: Outgoing, count: int, raise_errors: bool, meanwhile: Callable[[], object] | None = None
    ) -> list[Any]:
        """Receive the next `count` replies; later replies are left for `pipelined_replies`."""
        with self._closing():
            self._transfer(outgoing, self._replies.expected - count, meanwhile)
        replies, error = self._replies.take(count)
        self._outgoing = outgoing if self._replies.expected else None
        is_hung_up = outgoing.left or "Protocol error" in str(error)  # the broker reads no more, and closes
        if is_hung_up and self._outgoing is None:
            self.close()
        if error and (raise_errors or isinstance(error, BusyLoadingError)):
            if self._outgoing:  # nobody will ask for what follows
                self.close()
            raise error
        return replies

    @contextmanager
    def _closing(self) -> Iterator[None]:
        """Close the connection if the block raises; an OSError becomes redis-py's ConnectionError."""
        try:
            yield
        except OSError as cause:
            self.close()
            raise RedisConnectionError(f"the connection to the broker broke: {cause}") from cause
        except BaseException:
            self.close()
            raise

    def _ready(self) -> None:
        """Make sure that the connection is open and that no replies are outstanding on it."""
        if self._link is not None and (self._outgoing or not self._in_step(self._link)):
            self.close()
        if self._link is None:
            self._connection.connect()
            self._link = self._connection._get_socket()
            assert self._link is not None
            self._link.setblocking(False)
            _widen(self._link)
            self._replies = ReplyParser()

    def _in_step(self, link: socket.socket) -> bool:
        """Whether the connection is up and has received nothing unrequested except pushes."""
        try:
            self._receive(link)
        except OSError:
            return False
        return self._replies.waiting[:1] in (b"", b">")

    def _transfer(self, outgoing: Outgoing, later: int, meanwhile: Callable[[], object] | None) -> None:
        """Send and receive until all replies but the last `later` are complete."""
        link = self._link
        assert link is not None
        watch = _Watch(link, self._stall_s)
        while (missing := self._replies.missing) > later:
            if self._interrupt is not None and self._interrupt():
                raise Interrupted("the transfer was cancelled")
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
        """Send as much as the rate limit and the socket allow now; returns the number of bytes."""
        pieces = outgoing.head(self._allowance(outgoing.ready))
        if not pieces:
            return 0
        try:
            sent = link.send(pieces[0]) if isinstance(link, ssl.SSLSocket) else link.sendmsg(pieces)
        except _WANTS:
            return 0
        except OSError:
            if not self._receive(link):  # the broker's last words before it closed the connection
                raise
            return 0
        outgoing.sent(sent)
        self._allowed_bytes -= sent
        self.bytes_sent += sent
        return sent

    def _allowance(self, ready: int) -> int:
        """How many of the `ready` bytes the rate limit allows now."""
        if self._pacer is None or not ready:
            return ready
        if not self._allowed_bytes:
            self._allowed_bytes, self._allowed_at = self._pacer.reserve(ready)
        return self._allowed_bytes if self._pacer.clock() >= self._allowed_at else 0

    def _receive(self, link: socket.socket) -> int:
        """Receive the available bytes; returns their number. Raises OSError: the other side closed the connection."""
        try:
            count = link.recv_into(self._replies.space())
        except _WANTS:
            return 0
        if not count:
            raise ConnectionResetError("the other side closed the connection")
        self._replies.received(count)
        self.bytes_received += count
        return count


@dataclass(frozen=True, slots=True)
class Wires:
    """One thread's connections to the broker: one for short exchanges, one for large values; both may be the same.

    On one machine, TCP is faster for values up to a few hundred kB, and a unix socket for larger values.
    """

    short: Wire
    large: Wire

    @classmethod
    def to(cls, client: Redis, near: Redis | None = None, **options: Any) -> "Wires":
        """Create wires with `Wire`'s options from `client`; the short wire from `near`, if given and different."""
        large = Wire(client, **options)
        return cls(large if near in (None, client) else Wire(near, **options), large)

    @property
    def bytes_sent(self) -> int:
        return sum(wire.bytes_sent for wire in {self.short, self.large})

    @property
    def bytes_received(self) -> int:
        return sum(wire.bytes_received for wire in {self.short, self.large})


class _Watch:
    """Waits for a socket, until nothing has moved on it for `stall_s` seconds.

    Bytes leave the machine long after they were handed to the system: bytes that the other side confirms count as
    movement.
    """

    def __init__(self, link: socket.socket, stall_s: float) -> None:
        self._link, self._stall_s = link, stall_s
        self._poll = select.poll()
        self._moved_at = time.monotonic()
        self._queued = 0

    def moved(self) -> None:
        self._moved_at = time.monotonic()

    def wait(self, writing: bool, not_before: float) -> None:
        """Wait until the socket is ready, or at most half a second; sending (`writing`) waits for the time
        `not_before`.

        Raises: RedisTimeoutError: nothing has moved for `stall_s` seconds.
        """
        now = time.monotonic()
        held_s = max(0.0, not_before - now) if writing else 0.0
        if held_s or self._confirmed():
            self._moved_at = now
        left_s = self._moved_at + self._stall_s - now
        if left_s <= 0:
            raise RedisTimeoutError(f"the broker neither sent nor accepted a byte for {self._stall_s:g} seconds")
        self._poll.register(self._link, select.POLLIN | (select.POLLOUT if writing and not held_s else 0))
        self._poll.poll(1000 * min(_LOOK_S, left_s, held_s or left_s))

    def _confirmed(self) -> bool:
        """Whether the other side has confirmed bytes since the last call."""
        before, self._queued = self._queued, unconfirmed_bytes(self._link)
        return self._queued < before


def _widen(link: socket.socket) -> None:
    """Enlarge a unix socket's buffers; for network sockets, the system measures and sets the sizes itself."""
    if link.family == socket.AF_UNIX:
        for way in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with suppress(OSError):  # macOS refuses what is above its limit
                link.setsockopt(socket.SOL_SOCKET, way, ROOM_BYTES)


def unconfirmed_bytes(link: socket.socket) -> int:
    """Bytes handed to the system that have not reached the other side's system; 0 if this system does not tell."""
    try:
        if sys.platform == "darwin":
            return link.getsockopt(socket.SOL_SOCKET, _SO_NWRITE)
        return int(struct.unpack("i", fcntl.ioctl(link, termios.TIOCOUTQ, b"\0\0\0\0"))[0])
    except OSError:
        return 0
