"""The worker's end of a gateway: a private unix socket whose connections each go through a WebSocket to the broker.

redis-py, RQ and `Wire` connect to the socket as to a broker on this machine; the gateway logs in for them.
"""

import asyncio
import contextlib
import random
import shutil
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import structlog
import truststore
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from computeshare import __version__
from computeshare.errors import SettingsError, Unreachable
from computeshare.runtime.signatures import SigningKey
from computeshare.transport.addresses import FORWARDED, is_loopback_url
from computeshare.transport.machine_key import MachineKey

PIECE_BYTES, SLOW_PIECE_BYTES = 1 << 18, 1 << 14
"""The most bytes of a message; on links that take longer than `SLOW_S` for one, the second."""
SLOW_S = 0.5
UNSENT_BYTES = 1 << 18
"""How much the system may hold that was not sent yet: more would hide a stalled link from the sender."""
MAX_MESSAGE_BYTES = 1 << 20
PING_S, PONG_S = 15.0, 45.0
"""Seconds between pings, which keep proxies from cutting idle connections; seconds until the answer is overdue."""
OPEN_S, CLOSE_S = 10.0, 1.0
PATIENCE_S = 4.0
"""How long a new connection waits for a gateway that is away, before it is closed and redis-py tries again."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
START_S = 10.0
REFUSED = frozenset({401, 403})
REVOKED = 1008
"""The code with which a gateway closes a WebSocket if it refuses the machine (RFC 6455)."""
CHALLENGE_BYTES, ADMITTED = 32, "admitted"


class NotAdmitted(Exception):
    """A gateway refuses this machine's key."""


FAILURES = (OSError, TimeoutError, InvalidHandshake, ConnectionClosed, NotAdmitted, SettingsError)
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class GatewayAccess:
    """How a machine reaches the broker through a gateway.

    Args:
        url: the control plane's address with the gateway's path, `https://HOST/v1/gateway`.
        machine: the machine's id there.
        key: by which the machine proves who it is.
        certificate: in PEM, the only one that the gateway may have; empty: one that this system trusts.
    """

    url: str
    machine: str
    key: MachineKey
    certificate: str = ""

    @property
    def authorization(self) -> str:
        """The header `Authorization` with which the machine asks for a challenge."""
        return f"Machine {self.machine}"

    def proof(self, key: SigningKey, challenge: bytes) -> bytes:
        """The answer to a gateway's challenge."""
        return bytes.fromhex(key.sign("gateway", self.machine, challenge.hex()))


def trust(certificate: str = "") -> ssl.SSLContext:
    """TLS for a client: with this one certificate (PEM), whatever name it has; else with those this system trusts."""
    if not certificate:
        return truststore.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context = ssl.create_default_context(cadata=certificate)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


class Backoff:
    """The pause before the next try, common to all connections: doubled by each failure, with jitter."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pause_s = 0.0
        self._not_before = 0.0

    def wait_s(self) -> float:
        """Seconds until the next try; each caller gets some more, at random, so that not all try at once."""
        left_s = self._not_before - self._clock()
        return left_s + random.uniform(0, self._pause_s / 2) if left_s > 0 else 0.0

    def failed(self) -> None:
        """Note a failure. Those of tries that began before the last one count once."""
        now = self._clock()
        if now >= self._not_before:
            self._pause_s = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * self._pause_s))
            self._not_before = now + random.uniform(0.5, 1) * self._pause_s

    def succeeded(self) -> None:
        self._pause_s = self._not_before = 0.0


class Forwarder:
    """A thread that serves the unix socket, from `start` to `stop`.

    Args:
        on_refusal: called once, from the thread, if the gateway refuses this machine.
    """

    def __init__(self, access: GatewayAccess, on_refusal: Callable[[str], None] = lambda _: None) -> None:
        self._access, self._on_refusal = access, on_refusal
        self._tls = trust(access.certificate) if access.url.startswith("https:") else None
        self._folder = Path(tempfile.mkdtemp(prefix="cs-"))  # mode 0700
        self._backoff = Backoff()
        self._loop = asyncio.new_event_loop()
        self._ready, self._stopping = threading.Event(), asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="forwarder", daemon=True)
        self._away = False
        self.refusal = ""
        """The gateway's words, once it has refused this machine."""
        self.bytes_up = self.bytes_down = 0

    @property
    def redis_url(self) -> str:
        """The socket, as a broker's address."""
        return f"unix://{self._folder / FORWARDED}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to listen. Raises Unreachable: the socket cannot be made."""
        self._thread.start()
        if not self._ready.wait(START_S):
            raise Unreachable(f"cannot listen on {self._folder / FORWARDED}")

    def stop(self) -> None:
        """Close all connections, and remove the socket."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(START_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        path = str(self._folder / FORWARDED)
        async with await asyncio.start_unix_server(self._accept, path, limit=PIECE_BYTES):
            self._ready.set()
            await self._stopping.wait()
            for each in self._connections:
                each.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._forward(reader, writer)
        except FAILURES as error:
            self._tell_away(error)
        except asyncio.CancelledError:
            pass  # `stop`, to which a task of asyncio's server may not answer by its cancellation
        finally:
            writer.transport.abort()
            self._connections.discard(task)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection's bytes both ways until either side ends. Raises `FAILURES`."""
        there = await self._connect()
        try:
            ways = [asyncio.ensure_future(way) for way in (self._up(reader, there), self._down(there, writer))]
            try:
                done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in ways:
                    each.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
            for each in done:
                with contextlib.suppress(ConnectionClosed, OSError):  # that end is how connections end
                    each.result()
        finally:
            if there.transport.get_write_buffer_size():  # the other side does not read: it would not answer either
                there.transport.abort()
            else:
                await there.close()

    async def _up(self, reader: asyncio.StreamReader, there: ClientConnection) -> None:
        size = PIECE_BYTES
        while data := await reader.read(size):
            began = time.monotonic()
            await there.send(data)
            size = SLOW_PIECE_BYTES if time.monotonic() - began > SLOW_S else PIECE_BYTES
            self.bytes_up += len(data)

    async def _down(self, there: ClientConnection, writer: asyncio.StreamWriter) -> None:
        async for message in there:
            if isinstance(message, str):
                return  # no gateway sends text
            writer.write(message)
            await writer.drain()
            self.bytes_down += len(message)

    async def _connect(self) -> ClientConnection:
        """A WebSocket to the gateway, tried again with backoff for a while. Raises `FAILURES`."""
        until = time.monotonic() + PATIENCE_S
        while True:
            if (pause_s := self._backoff.wait_s()) > 0:
                await asyncio.sleep(min(pause_s, max(0.0, until - time.monotonic())))
                if pause_s > 0 and time.monotonic() >= until:
                    raise TimeoutError("the gateway does not answer")
            try:
                there = await self._admitted()
            except FAILURES as error:
                self._backoff.failed()
                self._note_refusal(error)
                if self.refusal or time.monotonic() >= until:
                    raise
            else:
                self._backoff.succeeded()
                if self._away:
                    self._away = False
                    log.info("the gateway answers again")
                _send_at_once(there.transport.get_extra_info("socket"))
                return there

    async def _admitted(self) -> ClientConnection:
        """A WebSocket on which this machine has proved who it is. Raises `FAILURES`."""
        refusal = NotAdmitted("this machine has no key")
        for key in self._access.key.candidates():
            there = await connect(**self._options())
            try:
                async with asyncio.timeout(OPEN_S):
                    await self._prove(there, key)
            except NotAdmitted as refused:  # after a lost answer, the gateway knows the next key
                refusal = refused
            except BaseException:
                there.transport.abort()
                raise
            else:
                self._access.key.accept(key)
                return there
        raise refusal

    async def _prove(self, there: ClientConnection, key: SigningKey) -> None:
        """Answer the gateway's challenge. Raises NotAdmitted, ConnectionClosed: the gateway is full, for example."""
        try:
            challenge = await there.recv()
            if not isinstance(challenge, bytes) or len(challenge) != CHALLENGE_BYTES:
                raise InvalidHandshake("this is no gateway, or one of another version")
            await there.send(self._access.proof(key, challenge))
            if await there.recv() != ADMITTED:
                raise InvalidHandshake("this is no gateway, or one of another version")
        except ConnectionClosed as closed:
            if closed.rcvd is not None and closed.rcvd.code == REVOKED:
                raise NotAdmitted(closed.rcvd.reason) from closed
            raise

    def _options(self) -> dict[str, Any]:
        return {
            "uri": "ws" + self._access.url.removeprefix("http"),
            "additional_headers": {"Authorization": self._access.authorization},
            "user_agent_header": f"computeshare/{__version__}",
            "compression": None,
            "max_size": MAX_MESSAGE_BYTES,
            "max_queue": 4,
            "write_limit": PIECE_BYTES,
            "ping_interval": PING_S,
            "ping_timeout": PONG_S,
            "open_timeout": OPEN_S,
            "close_timeout": CLOSE_S,
            "proxy": None if is_loopback_url(self._access.url) else True,
            "ssl": self._tls,
        }

    def _note_refusal(self, error: Exception) -> None:
        at_once = isinstance(error, InvalidStatus) and error.response.status_code in REFUSED
        if (at_once or isinstance(error, NotAdmitted)) and not self.refusal:
            self.refusal = _said(error)[:300] or "the gateway refuses this machine's key"
            self._on_refusal(self.refusal)

    def _tell_away(self, error: BaseException) -> None:
        if not self._away and not self.refusal:
            self._away = True
            log.warning("the gateway does not answer", error=_text(error))


def _said(error: BaseException) -> str:
    """A refusal in the gateway's words."""
    return (error.response.body or b"").decode(errors="replace") if isinstance(error, InvalidStatus) else str(error)


def _text(error: BaseException) -> str:
    if isinstance(error, InvalidStatus):
        return f"HTTP {error.response.status_code} {_said(error)[:200]}".strip()
    return str(error) or type(error).__name__


def _send_at_once(link: Any) -> None:
    """Keep the system from holding much that was not sent: a stalled link is then seen by the sender."""
    option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if link is not None and option is not None:
        with contextlib.suppress(OSError):
            link.setsockopt(socket.IPPROTO_TCP, option, UNSENT_BYTES)
