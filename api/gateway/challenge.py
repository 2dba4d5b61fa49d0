"""A machine proves that it holds its key: it signs what the gateway has just drawn, before anything else is read."""

import asyncio
import secrets

from api.gateway.machines import JoinedMachine
from api.gateway.relay import Receive, Send
from computeshare.runtime.signatures import SIGNATURE_BYTES, is_signed
from computeshare.transport.forwarder import CHALLENGE_BYTES

ANSWER_S = 5.0
"""How long a machine may take to answer."""


async def is_proven(machine: JoinedMachine, receive: Receive, send: Send, answer_s: float) -> bool:
    """Whether the first message on a machine's WebSocket is its signature over a new challenge and its id.

    Raises: TimeoutError: no message came in time.
    """
    challenge = secrets.token_bytes(CHALLENGE_BYTES)
    async with asyncio.timeout(answer_s):
        await send({"type": "websocket.send", "bytes": challenge})
        message = await receive()
    answer = message.get("bytes")
    if not isinstance(answer, bytes) or len(answer) != SIGNATURE_BYTES:
        return False
    return is_signed(machine.public_key, answer.hex(), "gateway", machine.id, challenge.hex())
