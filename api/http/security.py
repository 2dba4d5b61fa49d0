"""Middleware that authenticates requests, rejects cross-site requests, and sets the browsers' security headers."""

import hmac
import ipaddress
import math
import socket
from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

from fastapi_problem.error import Problem
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.problems import problem
from api.http.throttle import Throttle
from computeshare.bundles.manifest import CONTENT_BYTES
from computeshare.settings import EVERYWHERE, derive

COOKIE = "computeshare"
MAX_BODY_BYTES = 1024 * 1024
LARGE_BODIES, LARGE_BODY_BYTES = "/v1/bundles", CONTENT_BYTES
"""Routes whose bodies may be larger; each has a limit of its own."""
MAX_HEADERS, MAX_HEADER_BYTES = 100, 32_768
FAILED = frozenset({401, 403, 404, 410})
"""Status codes that count as a failed try of a login key or an invite's code."""
OPEN_FOLDERS = ("/static/", "/join/")
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/login", "/favicon.ico"})
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
WILDCARDS = EVERYWHERE | {""}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; font-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


def matches(given: str, expected: str) -> bool:
    """Compare two secrets in constant time."""
    return hmac.compare_digest(given.encode(errors="replace"), expected.encode())


def allowed_hosts(bind_host: str, others: Iterable[str]) -> frozenset[str]:
    """The host names that requests may use. Any other name is refused, against DNS rebinding."""
    own = {socket.gethostname().lower(), f"{socket.gethostname().lower()}.local"} if bind_host in WILDCARDS else set()
    return LOOPBACK | own | {bind_host.lower()} | {other.lower() for other in others}


class Guard:
    """ASGI middleware that checks the host, size and credentials of every request, and sets the security headers of
    every answer.
    """

    def __init__(
        self, app: ASGIApp, token: str, hosts: frozenset[str], login_page: Callable[[Request], Response]
    ) -> None:
        """`login_page` makes the answer to browsers that are not logged in."""
        self.app, self._login_page = app, login_page
        self._token = token
        self._cookie = derive(token, "cookie")
        self._hosts = hosts
        self._any_address = bool(hosts & WILDCARDS)
        self._throttle = Throttle()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        tries, address = _is_try(scope), (scope.get("client") or ("",))[0]

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                if tries and message["status"] in FAILED:
                    self._throttle.failed(address)
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                if scope["path"].startswith("/static/"):
                    headers.setdefault(
                        "cache-control", "no-cache"
                    )  # asked for again by its ETag, fresh after an upgrade
            await send(message)

        refusal = self._refusal(Request(scope))
        if refusal is None and tries and (wait_s := self._throttle.wait_s(address)):
            text = f"too many failed attempts from this address: try again in {math.ceil(wait_s)} s"
            refusal = _answer(problem(429, "Too many attempts", text, {"retry-after": str(math.ceil(wait_s))}))
        await (refusal or self.app)(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        """The error answer to a refused request; None: the request may pass."""
        if not self._is_own_name(request.headers.get("host", "")):
            text = (
                "the Host header names another server: open the address that computeshare up printed, or restart it "
                "with COMPUTESHARE_URL set to the address in use"
            )
            return _answer(problem(400, "Unknown host", text))
        headers = request.scope["headers"]
        if len(headers) > MAX_HEADERS or sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
            text = f"send at most {MAX_HEADERS} headers, {MAX_HEADER_BYTES:,} bytes in total"
            return _answer(problem(431, "Headers too large", text))
        path = request.scope["path"]  # not request.url's path, which the Host header can influence
        limit = LARGE_BODY_BYTES if path.startswith(LARGE_BODIES) else MAX_BODY_BYTES
        if _is_too_large(request.headers.get("content-length", "0"), limit):
            return _answer(problem(413, "Request too large", f"send at most {limit:,} bytes"))
        if path in OPEN_PATHS or path.startswith(OPEN_FOLDERS):
            return None
        return self._who(request)

    def _who(self, request: Request) -> Response | None:
        """Check the credentials: None for a program with the token and for a browser with the cookie, from
        ComputeShare's own pages if the request changes anything; else an error answer.
        """
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and matches(given.strip(), self._token):
            return None
        if not matches(request.cookies.get(COOKIE, ""), self._cookie):
            return self._unauthorised(request)
        if request.method not in ("GET", "HEAD", "OPTIONS") and not _same_origin(request):
            text = "browsers may send this request from ComputeShare's own pages only"
            return _answer(problem(403, "Another site's request", text))
        return None

    def _unauthorised(self, request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):
            return self._login_page(request)
        text = "send the header Authorization: Bearer TOKEN (computeshare token prints the token on its own machine)"
        return _answer(problem(401, "Not logged in", text, {"www-authenticate": "Bearer"}))

    def _is_own_name(self, host: str) -> bool:
        try:
            parts = urlsplit(f"//{host}")
            name = (parts.hostname or "").lower()
        except ValueError:
            return False
        if parts.netloc != host:
            return False
        return (name in self._hosts and name != "") or (self._any_address and _is_address(name))


def _is_try(scope: Scope) -> bool:
    """Whether a request presents a login key or an invite's code."""
    path = str(scope["path"])
    return path.startswith("/join/") or (path == "/login" and b"key=" in scope.get("query_string", b""))


def _is_too_large(content_length: str, limit: int) -> bool:
    try:
        return int(content_length) > limit
    except ValueError:
        return True


def is_loopback(name: str) -> bool:
    """Whether this is an address of this machine alone."""
    return name == "localhost" or (_is_address(name) and ipaddress.ip_address(name).is_loopback)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _same_origin(request: Request) -> bool:
    """Whether a request is from this server's own page, by the browser's headers. Requests without such headers pass:
    they are not from a browser, so no other site has caused them.
    """
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is not None:
        return site in ("same-origin", "none")
    return origin is None or urlsplit(origin).netloc == request.headers.get("host")


def _answer(refused: Problem) -> Response:
    headers = dict(refused.headers or {})
    return JSONResponse(refused.marshal(), refused.status, headers, media_type="application/problem+json")
