"""The gateway's ASGI application: admits WebSockets of invited machines and carries them to the broker."""

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import structlog

from api.broker import Broker
from api.database import Database
from api.gateway.broker_stream import BrokerStream
from api.gateway.machines import Machine, Machines
from api.gateway.relay import STALL_S, Receive, Send, relay
from api.gateway.traffic import Traffic
from api.http.throttle import Throttle, network_of
from computeshare.errors import ComputeShareError
from computeshare.settings import Settings

PER_MACHINE, IN_ALL = 64, 600
"""The most open connections of one machine, and of all machines at one gateway."""
TRIES, TRY_S = 10, 3.0
"""Wrong credentials that an address may send in a row; seconds until it may send a further one."""
OPENINGS, OPENING_S = 200, 0.05
"""Connections that a machine may open in a row; seconds until it may open a further one."""
CHECK_S = 1.0
"""Seconds between looks for revoked machines, and between writings of the counts."""
LONGEST_CREDENTIAL = 256
CLOSE_S = 1.0
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a gateway."""

    per_machine: int = PER_MACHINE
    in_all: int = IN_ALL
    stall_s: float = STALL_S


@dataclass(eq=False, slots=True)
class _Open:
    """An open connection, and the event that cuts it."""

    machine: Machine
    cut: asyncio.Event = field(default_factory=asyncio.Event)


class _Refused(Exception):
    """Why a connection is refused: an HTTP status and a sentence."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


class Gateway:
    """Answers WebSocket connections only. Each carries one connection to the broker, as binary messages.

    A machine sends its credential as a bearer token. The gateway logs in to the broker itself, so that machines learn
    neither the broker's address nor a password.
    """

    def __init__(self, machines: Machines, traffic: Traffic, limits: Limits | None = None) -> None:
        self._machines, self._traffic, self._limits = machines, traffic, limits or Limits()
        self._tries, self._openings = Throttle(TRIES, TRY_S), Throttle(OPENINGS, OPENING_S)
        self._open: set[_Open] = set()
        self._watch: asyncio.Task[None] | None = None

    @property
    def connections(self) -> Counter[str]:
        """Open connections by machine's id."""
        return Counter(each.machine.id for each in self._open)

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        await receive()
        try:
            connection = _Open(await self._admitted(scope))
            self._open.add(connection)
            try:
                await self._serve(connection, receive, send)
            finally:
                self._open.discard(connection)
        except _Refused as refused:
            await _refuse(send, refused)

    async def _serve(self, connection: _Open, receive: Receive, send: Send) -> None:
        """Connect a machine to the broker until either side ends. Raises _Refused, before it has accepted."""
        broker = await self._broker(connection.machine)
        try:
            if self._watch is None or self._watch.done():
                self._watch = asyncio.create_task(self._look_after())
            await send({"type": "websocket.accept"})
            count = partial(self._traffic.add, connection.machine.id)
            code = await relay(receive, send, broker, count, connection.cut, self._limits.stall_s)
        finally:
            broker.abort()
        with contextlib.suppress(Exception):  # the other side is gone, or reads nothing
            async with asyncio.timeout(CLOSE_S):
                await send({"type": "websocket.close", "code": code})

    async def _admitted(self, scope: Any) -> Machine:
        """The machine that asks for a connection. Raises _Refused."""
        headers = dict(scope["headers"])
        address = network_of((scope.get("client") or ("",))[0])
        if b"origin" in headers:  # machines send none, browsers always do
            raise _Refused(403, "browsers may not use the gateway")
        scheme, _, given = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        found = None
        if scheme.lower() == "bearer" and len(given) <= LONGEST_CREDENTIAL:
            found = await asyncio.to_thread(self._machines.find, given.strip())
        if found is None:  # a right one always passes: behind a tunnel, all machines may have the same address
            if self._tries.wait_s(address):
                raise _Refused(429, "too many failed attempts from this address: try again later")
            self._tries.take(address)
            raise _Refused(401, "this machine's credential is not valid, or was revoked: ask for a new invite")
        if self.connections[found.id] >= self._limits.per_machine:
            raise _Refused(429, f"this machine has {self._limits.per_machine} connections open already")
        if len(self._open) >= self._limits.in_all:
            raise _Refused(503, "the gateway has no room for further connections: try again later")
        if self._openings.wait_s(found.id):
            raise _Refused(429, "this machine opens too many connections: try again later")
        self._openings.take(found.id)
        return found

    async def _broker(self, machine: Machine) -> BrokerStream:
        """A connection to the broker for this machine. Raises _Refused."""
        try:
            return await BrokerStream.open(self._machines.broker_url(machine))
        except ComputeShareError as error:
            log.warning("a machine cannot be connected to the broker", machine=machine.name, error=str(error))
            raise _Refused(503, "the broker does not answer: try again later") from error

    async def _look_after(self) -> None:
        """Cut the connections of revoked machines and write the counts, while there are connections."""
        while self._open:
            await asyncio.sleep(CHECK_S)
            with contextlib.suppress(Exception):  # a locked database: the next look is a second later
                revoked = await asyncio.to_thread(self._machines.revoked, set(self.connections))
                for each in [one for one in self._open if one.machine.id in revoked]:
                    each.cut.set()
            await asyncio.to_thread(self._traffic.flush)


def gateway_of(settings: Settings, database: Database, broker: Broker) -> Gateway:
    """A gateway to the broker that these settings name."""
    return Gateway(Machines(database, settings.resolve_redis_url), Traffic(broker.client))


async def _refuse(send: Send, refused: _Refused) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"cache-control", b"no-store")]
    await send({"type": "websocket.http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": refused.text.encode()})
