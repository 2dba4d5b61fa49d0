"""One machine's connection: bytes between a WebSocket and the broker, until either side ends or stalls."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from api.gateway.broker_stream import PIECE_BYTES, BrokerStream
from api.gateway.commands.filter import CommandFilter, TooManyRefused, TooMuchUnfinished
from api.gateway.commands.parser import NotACommand

STALL_S = 60.0
"""How long either side may take to accept one message, before the connection is cut."""
JOINED_BYTES = 1 << 14
"""The longest message whose commands are sent at once: copying them costs less than further calls to the system."""
NORMAL, AWAY, NOT_RESP, NOT_BYTES, REVOKED, SLOW = 1000, 1001, 1002, 1003, 1008, 1013
"""Codes with which the gateway closes a WebSocket (RFC 6455)."""
Message = Mapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Count = Callable[[str, int], None]


async def relay(
    receive: Receive,
    send: Send,
    broker: BrokerStream,
    commands: CommandFilter,
    count: Count,
    cut: asyncio.Event,
    stall_s: float = STALL_S,
) -> int:
    """Carry the broker's replies, and the commands that pass, each message at most `PIECE_BYTES` long. Returns the code
    to close the WebSocket with.

    Args:
        count: called with `up` or `down`, and a number of bytes that were carried.
        cut: ends the connection at once when it is set.
    """
    ways = [
        asyncio.ensure_future(each)
        for each in (
            _up(receive, broker, commands, count, stall_s),
            _down(send, broker, commands, count, stall_s),
            _revoked(cut),
        )
    ]
    try:
        done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        return max(_code(each) for each in done)
    finally:
        for each in ways:
            each.cancel()
        await asyncio.gather(*ways, return_exceptions=True)


def _code(way: "asyncio.Future[int]") -> int:
    error = way.exception()
    if error is None:
        return way.result()
    if isinstance(error, NotACommand | TooManyRefused):
        return NOT_RESP if isinstance(error, NotACommand) else REVOKED
    return SLOW if isinstance(error, TimeoutError | TooMuchUnfinished) else AWAY


async def _up(receive: Receive, broker: BrokerStream, commands: CommandFilter, count: Count, stall_s: float) -> int:
    while True:
        message = await receive()
        if message["type"] != "websocket.receive":
            return NORMAL
        if not isinstance(data := message.get("bytes"), bytes):
            return NOT_BYTES
        async for pieces in commands.passed(data):
            for piece in pieces if len(data) > JOINED_BYTES else [b"".join(pieces)]:
                broker.writer.write(piece)
            async with asyncio.timeout(stall_s):
                await broker.writer.drain()
        count("up", len(data))


async def _down(send: Send, broker: BrokerStream, commands: CommandFilter, count: Count, stall_s: float) -> int:
    while data := await broker.reader.read(PIECE_BYTES):
        async with asyncio.timeout(stall_s):
            await send({"type": "websocket.send", "bytes": data})
        commands.replies.taken(data)
        count("down", len(data))
    return AWAY


async def _revoked(cut: asyncio.Event) -> int:
    await cut.wait()
    return REVOKED
