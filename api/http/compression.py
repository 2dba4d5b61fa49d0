"""Pages, scripts and JSON travel compressed to whoever takes that; weights travel as they are."""

from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

SMALLEST_BYTES = 1000
LEVEL = 5
AS_IT_IS = "/checkpoints/"
"""What lies below: it hardly gets smaller, and is asked for by ranges of its own bytes."""


class Compress:
    """Compresses every answer but weights and streams of events."""

    def __init__(self, app: ASGIApp) -> None:
        self._plain = app
        self._compressed = GZipMiddleware(app, SMALLEST_BYTES, LEVEL)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        plain = scope["type"] != "http" or AS_IT_IS in scope["path"]
        await (self._plain if plain else self._compressed)(scope, receive, send)
