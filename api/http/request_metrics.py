"""Middleware that counts and times requests."""

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.system.telemetry import Telemetry

METHODS = frozenset({"GET", "POST", "DELETE", "HEAD", "PUT", "PATCH", "OPTIONS"})


class Measure:
    """Counts requests by route and status. (Not by path, because clients could then create any number of labels.)"""

    def __init__(self, app: ASGIApp, telemetry: Telemetry) -> None:
        self.app, self._telemetry = app, telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()

        async def watch(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "other")
                method = scope["method"] if scope["method"] in METHODS else "other"
                self._telemetry.requests.labels(method, route, message["status"]).inc()
                self._telemetry.seconds.labels(route).observe(time.perf_counter() - started)
            await send(message)

        await self.app(scope, receive, watch)
