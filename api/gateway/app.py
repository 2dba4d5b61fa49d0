"""The gateway's ASGI application: admits WebSockets of invited machines and carries them to the broker."""

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import structlog

from api.broker import Broker
from api.database import Database
from api.gateway.broker_stream import BrokerStream
from api.gateway.challenge import ANSWER_S, is_proven
from api.gateway.commands.access import Access
from api.gateway.commands.filter import CommandFilter
from api.gateway.commands.holdings import Holdings
from api.gateway.commands.rates import CALL_S, CALLS, SELDOM, CommandRates
from api.gateway.commands.replies import AwaitedReplies, Unread
from api.gateway.machines import JoinedMachine, Machines
from api.gateway.refusals import Refusals
from api.gateway.relay import REVOKED, SLOW, STALL_S, Receive, Send, relay
from api.gateway.traffic import Traffic
from api.http.throttle import Throttle, network_of
from computeshare.errors import ComputeShareError
from computeshare.settings import Settings
from computeshare.transport.forwarder import ADMITTED

PER_MACHINE, IN_ALL = 64, 600
"""The most open connections of one machine, and of all machines at one gateway."""
ASKED_OF_MACHINE, ASKED_OF_ADDRESS = 16, 64
"""The most connections that are still to prove who they are: of a machine's id from one address, and of an address."""
TRIES, TRY_S = 10, 3.0
"""Wrong ids and signatures that an address may send in a row; seconds until it may send a further one."""
OPENINGS, OPENING_S = 200, 0.05
"""Connections that a machine may open in a row; seconds until it may open a further one."""
CHECK_S = 1.0
"""Seconds between looks for machines that are refused by now, and between writings of the counts."""
LONGEST_ID = 64
CLOSE_S = 1.0
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """Limits of a gateway."""

    per_machine: int = PER_MACHINE
    in_all: int = IN_ALL
    stall_s: float = STALL_S
    answer_s: float = ANSWER_S


@dataclass(eq=False, slots=True)
class _Open:
    """An open connection, and the event that cuts it."""

    machine: JoinedMachine
    cut: asyncio.Event = field(default_factory=asyncio.Event)


class _Refused(Exception):
    """Why a connection is refused: an HTTP status and a sentence."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text

    @property
    def is_final(self) -> bool:
        """Whether a further try would be refused, too."""
        return self.status in (401, 403)


class Gateway:
    """Answers WebSocket connections only. Each carries one connection to the broker, as binary messages.

    A machine names its id and proves by a signature that it holds the key. The gateway logs in to the broker itself, so
    that machines learn neither the broker's address nor a password, and passes on only what a worker of theirs needs.
    """

    def __init__(
        self,
        machines: Machines,
        traffic: Traffic,
        access: Access,
        holdings: Holdings,
        limits: GatewayLimits | None = None,
    ) -> None:
        self._machines, self._traffic, self._limits = machines, traffic, limits or GatewayLimits()
        self._access, self._holdings, self.refusals = access, holdings, Refusals()
        self._tries, self._openings = Throttle(TRIES, TRY_S), Throttle(OPENINGS, OPENING_S)
        self.rates = CommandRates(Throttle(CALLS, CALL_S), {name: Throttle(*limit) for name, limit in SELDOM.items()})
        self._open: set[_Open] = set()
        self._asked: Counter[tuple[str, str]] = Counter()  # still to prove who they are, by address and machine's id
        self._unread: WeakValueDictionary[str, Unread] = WeakValueDictionary()
        self._unfinished: Counter[str] = Counter()
        self._watch: asyncio.Task[None] | None = None

    @property
    def connections(self) -> Counter[str]:
        """Open connections by machine's id."""
        return Counter(each.machine.id for each in self._open)

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        await receive()
        address = network_of((scope.get("client") or ("",))[0])
        try:
            machine = await self._named(scope, address)
        except _Refused as refused:
            await _refuse(send, refused)
            return
        await send({"type": "websocket.accept"})
        try:
            connection = _Open(await self._admitted(machine, address, receive, send))
            self._open.add(connection)
            try:
                await self._serve(connection, receive, send)
            finally:
                self._open.discard(connection)
        except _Refused as refused:
            await _close(send, REVOKED if refused.is_final else SLOW, refused.text)

    async def _serve(self, connection: _Open, receive: Receive, send: Send) -> None:
        """Connect a machine to the broker until either side ends. Raises _Refused, before the machine may begin."""
        broker = await self._broker(connection.machine)
        machine = connection.machine
        note = partial(self.refusals.note, machine.id, machine.name)
        replies = AwaitedReplies(self._unread.setdefault(machine.id, Unread()))
        commands = CommandFilter(machine.id, self._access, note, replies, self._unfinished, self.rates, self._holdings)
        try:
            if self._watch is None or self._watch.done():
                self._watch = asyncio.create_task(self._look_after())
            await send({"type": "websocket.send", "text": ADMITTED})
            count = partial(self._traffic.add, machine.id)
            code = await relay(receive, send, broker, commands, count, connection.cut, self._limits.stall_s)
        finally:
            broker.abort()
            commands.close()
        await _close(send, code)

    async def _named(self, scope: Any, address: str) -> JoinedMachine:
        """The machine that a request names, which is still to prove that it is this one. Raises _Refused."""
        headers = dict(scope["headers"])
        if b"origin" in headers:  # machines send none, browsers always do
            raise _Refused(403, "browsers may not use the gateway")
        if self._asked.total() >= self._limits.in_all:
            raise _Refused(503, "the gateway has no room for further connections: try again later")
        scheme, _, given = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        found = None
        if scheme.lower() == "machine" and len(given) <= LONGEST_ID:
            found = await asyncio.to_thread(self._machines.find, given.strip())
        if found is None:
            raise self._failed(address)
        return found

    async def _admitted(self, machine: JoinedMachine, address: str, receive: Receive, send: Send) -> JoinedMachine:
        """The machine, once it has proved who it is. Raises _Refused."""
        asked = address, machine.id
        of_address = sum(count for (one, _), count in self._asked.items() if one == address)
        if self._asked[asked] >= ASKED_OF_MACHINE or of_address >= ASKED_OF_ADDRESS:
            raise _Refused(429, "too many connections from here are still to answer the challenge: try again later")
        self._asked[asked] += 1
        try:
            proven = await is_proven(machine, receive, send, self._limits.answer_s)
        except TimeoutError as error:
            raise _Refused(408, "this machine did not answer the challenge in time: try again") from error
        finally:
            self._asked[asked] -= 1
            self._asked += Counter()  # drops those that are 0
        if not proven:
            raise self._failed(address)
        if self.connections[machine.id] >= self._limits.per_machine:
            raise _Refused(429, f"this machine has {self._limits.per_machine} connections open already")
        if len(self._open) >= self._limits.in_all:
            raise _Refused(503, "the gateway has no room for further connections: try again later")
        if not self._openings.admits(machine.id):
            raise _Refused(429, "this machine opens too many connections: try again later")
        return machine

    def _failed(self, address: str) -> _Refused:
        """Count a failed attempt. A right one always passes: behind a tunnel, all machines may have one address."""
        if not self._tries.admits(address):
            return _Refused(429, "too many failed attempts from this address: try again later")
        return _Refused(401, "this machine's key is not valid here, or its access has ended: ask for a new invite")

    async def _broker(self, machine: JoinedMachine) -> BrokerStream:
        """A connection to the broker for this machine. Raises _Refused."""
        try:
            return await BrokerStream.open(self._machines.broker_url(machine))
        except ComputeShareError as error:
            log.warning("a machine cannot be connected to the broker", machine=machine.name, error=str(error))
            raise _Refused(503, "the broker does not answer: try again later") from error

    async def _look_after(self) -> None:
        """Cut the connections of refused machines, write the counts, have what machines write expire and tell the other
        gateways what they hold, while a machine is connected or holds anything.
        """
        await asyncio.to_thread(self._holdings.share)  # what the others told last may be old
        holds = True
        while self._open or holds:
            await asyncio.sleep(CHECK_S)
            with contextlib.suppress(Exception):  # a locked database: the next look is a second later
                refused = await asyncio.to_thread(self._machines.refused, {one.machine for one in self._open})
                for each in [one for one in self._open if one.machine in refused]:
                    each.cut.set()
            await asyncio.to_thread(self._traffic.flush)
            holds = await asyncio.to_thread(self._holdings.look)
            await asyncio.to_thread(self._holdings.share)


def gateway_of(settings: Settings, database: Database, broker: Broker) -> Gateway:
    """A gateway to the broker that these settings name."""
    access = Access(broker.client)
    holdings = Holdings(broker.client, access.round_bytes)
    return Gateway(Machines(database, settings.resolve_gateway_redis_url), Traffic(broker.client), access, holdings)


async def _close(send: Send, code: int, reason: str = "") -> None:
    with contextlib.suppress(Exception):  # the other side is gone, or reads nothing
        async with asyncio.timeout(CLOSE_S):
            await send({"type": "websocket.close", "code": code, "reason": reason})


async def _refuse(send: Send, refused: _Refused) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"cache-control", b"no-store")]
    await send({"type": "websocket.http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": refused.text.encode()})
