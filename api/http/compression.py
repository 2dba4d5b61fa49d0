"""Compresses pages, scripts and JSON with gzip for clients that accept it; weights are sent uncompressed."""

from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

SMALLEST_BYTES = 1000
LEVEL = 5
AS_IT_IS = ("/checkpoints/", "/v1/worker/")
"""Paths with such a part are not compressed: weights and wheels hardly shrink, and clients ask for ranges of the
original bytes."""


class Compress:
    """ASGI middleware that compresses every answer except weights, wheels and event streams."""

    def __init__(self, app: ASGIApp) -> None:
        self._plain = app
        self._compressed = GZipMiddleware(app, SMALLEST_BYTES, LEVEL)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        plain = scope["type"] != "http" or any(part in scope["path"] for part in AS_IT_IS)
        await (self._plain if plain else self._compressed)(scope, receive, send)
