"""Middleware that limits the time in which a request's body must arrive."""

import asyncio
import time

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

GRACE_S = 10.0
"""How long a body may take to arrive, whatever its size."""
SLOWEST_BYTES_PER_S = 10_000
"""The slowest rate beyond that time: 1 MiB may take 115 s."""


class BodyDeadline:
    """Answers 408 to a request whose body comes too slowly (slow-body attacks)."""

    def __init__(self, app: ASGIApp, grace_s: float = GRACE_S) -> None:
        self._app, self._grace_s = app, grace_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, arrived, more = time.monotonic(), 0, True

        async def receive_in_time() -> Message:
            nonlocal arrived, more
            if not more:  # this waits for the client to go, which may take as long as it likes
                return await receive()
            left_s = started + self._grace_s + arrived / SLOWEST_BYTES_PER_S - time.monotonic()
            try:
                message = await asyncio.wait_for(receive(), max(0.0, left_s))
            except TimeoutError:
                text = "the request's body came too slowly: try again over a faster link"
                raise HTTPException(408, text, {"connection": "close"}) from None
            arrived += len(message.get("body", b""))
            more = message.get("more_body", False)
            return message

        await self._app(scope, receive_in_time, send)
