"""Middleware that authenticates requests, checks their scopes and rates, and rejects cross-site requests."""

import asyncio
import ipaddress
import math
import socket
from collections import Counter
from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

from fastapi.concurrency import run_in_threadpool
from fastapi_problem.error import Problem
from sqlalchemy.exc import SQLAlchemyError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.access.caller import OWNER, Caller, current
from api.access.credentials import Credentials
from api.http.headers import LOOPBACK, add_headers
from api.http.problems import problem
from api.http.scopes import READS, needed, refused_with
from api.http.throttle import Throttle, Tries, network_of
from computeshare.bundles.manifest import CONTENT_BYTES
from computeshare.errors import ComputeShareError
from computeshare.settings import EVERYWHERE
from computeshare.tasks.recipes.bundle import MOST_BYTES
from computeshare.transport.addresses import GATEWAY_PATH

COOKIE = "computeshare"
MAX_BODY_BYTES = 1024 * 1024
JOB_BYTES = 8 << 20
"""Of a body with a JobSpec: a recipe's facts name up to 20,000 tensors."""
LARGE_BODIES = {"/v1/bundles": CONTENT_BYTES, "/v1/recipes": 8 * MOST_BYTES, "/v1/jobs": JOB_BYTES}
"""The largest bodies of the routes below a path; each route has a limit of its own."""
MAX_HEADERS, MAX_HEADER_BYTES = 100, 32_768
FAILED = frozenset({401, 403, 404, 408, 410})
"""Status codes that count as a failed try of a login key, an invite's code or a link's code."""
TRIES, TRY_S = 10, 3.0
"""The most failed tries of an address in a row, before it must wait; seconds until it may make a further try."""
BURST, REQUEST_S = 200, 0.05
"""The most requests of a token or a link in a row; seconds until it may make a further request."""
AT_ONCE = 100
"""The most requests of a token or a link at the same time: one is answered with event streams, which stay open."""
CHECK_S = 2.0
"""Seconds after which a request that is still being answered ends, if its token or link was revoked."""
SHARED = "/shared/"
WHEELS = "/v1/worker/"
OPEN_FOLDERS = ("/static/", "/join/", WHEELS, SHARED)
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/login", "/favicon.ico"})
WILDCARDS = EVERYWHERE | {""}
Explain = Callable[[Request, Exception], Response]


def allowed_hosts(bind_host: str, others: Iterable[str]) -> frozenset[str]:
    """The host names that requests may use. Any other name is refused, against DNS rebinding."""
    own = {socket.gethostname().lower(), f"{socket.gethostname().lower()}.local"} if bind_host in WILDCARDS else set()
    return LOOPBACK | own | {bind_host.lower()} | {other.lower() for other in others}


class Guard:
    """ASGI middleware that checks the host, size, credentials and scope of every request, and sets the security headers
    of every answer. WebSockets are refused, but those of `GATEWAY_PATH`, which check their credentials themselves.
    """

    def __init__(
        self,
        app: ASGIApp,
        credentials: Credentials,
        hosts: frozenset[str],
        login_page: Callable[[Request], Response],
        explain: Explain,
        gateway: ASGIApp,
    ) -> None:
        """`login_page` makes the answer to browsers that are not logged in, `explain` the answer to an error."""
        self._gateway = gateway
        self.app, self._login_page, self._explain = app, login_page, explain
        self._credentials = credentials
        self._hosts = hosts
        self._any_address = bool(hosts & WILDCARDS)
        self._tries = Tries(Throttle(TRIES, TRY_S))
        self._requests = Throttle(BURST, REQUEST_S)
        self._answering: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket" and scope["path"] == f"/{GATEWAY_PATH}":
            await self._gateway(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        address = request.client.host if request.client else ""
        open_try: str | None = None  # the network whose try has no result yet

        def end_try(is_right: bool) -> None:
            nonlocal open_try
            if open_try is not None:
                self._tries.end(open_try, is_right)
                open_try = None

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                end_try(message["status"] not in FAILED)
                host = _name_of(request.headers.get("host", "")) or ""
                add_headers(MutableHeaders(scope=message), scope["path"], scope["scheme"], host)
            await send(message)

        try:
            try:
                self._check_form(request)
                if _is_try(scope):
                    network = network_of(address)
                    self._check_wait(await self._tries.begin(network), "too many failed attempts from this address")
                    open_try = network
                caller = await self._caller(request)
                self._check_right(request, caller)
            except (HTTPException, Problem, ComputeShareError, SQLAlchemyError) as refusal:
                await self._refusal(request, refusal)(scope, receive, send_with_headers)
                return
            if caller is None:
                await self.app(scope, receive, send_with_headers)
                return
            end_try(is_right=True)  # a link's code was right, whatever is answered
            await self._serve(caller, address, scope, receive, send_with_headers)
        finally:
            end_try(is_right=False)

    async def _serve(self, caller: Caller, address: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that may pass, of this caller."""
        scope.setdefault("state", {})["caller"] = caller
        mark = current.set((caller, address))
        try:
            await self._watched(caller, scope, receive, send)
        finally:
            current.reset(mark)

    async def _watched(self, caller: Caller, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; a stream ends once its token or link has expired or was revoked."""
        if caller is OWNER:
            await self.app(scope, receive, send)
            return
        streams = False

        async def watch(message: Message) -> None:
            nonlocal streams
            if message["type"] == "http.response.start":
                streams = "content-length" not in Headers(raw=message["headers"])
            await send(message)

        self._answering[caller.id] += 1
        answering = asyncio.ensure_future(self.app(scope, receive, watch))
        try:
            while not (await asyncio.wait({answering}, timeout=CHECK_S))[0]:
                if streams and not await run_in_threadpool(self._credentials.hold, caller):
                    answering.cancel()
                    await asyncio.wait({answering})
                    await send({"type": "http.response.body"})
                    return
            await answering
        finally:
            answering.cancel()
            self._answering -= Counter((caller.id,))

    def _refusal(self, request: Request, error: Exception) -> Response:
        if getattr(error, "status", None) == 401 and "text/html" in request.headers.get("accept", ""):
            return self._login_page(request)
        return self._explain(request, error)

    def _check_form(self, request: Request) -> None:
        """Raises a refusal: the request names another server, or is too large."""
        if not self._is_own_name(request.headers.get("host", "")):
            text = (
                "the Host header names another server: open the address that computeshare up printed, or restart it "
                "with COMPUTESHARE_URL set to the address in use"
            )
            raise problem(400, "Unknown host", text)
        headers = request.scope["headers"]
        if len(headers) > MAX_HEADERS or sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
            text = f"send at most {MAX_HEADERS} headers, {MAX_HEADER_BYTES:,} bytes in total"
            raise problem(431, "Headers too large", text)
        path = request.scope["path"]  # not request.url's path, which the Host header can influence
        limit = next((most for start, most in LARGE_BODIES.items() if path.startswith(start)), MAX_BODY_BYTES)
        if _is_too_large(request.headers.get("content-length", "0"), limit):
            raise problem(413, "Request too large", f"send at most {limit:,} bytes")

    async def _caller(self, request: Request) -> Caller | None:
        """Who sends a request; None if it needs no credentials. Raises a refusal."""
        path = request.scope["path"]
        if path.startswith(SHARED):
            found = await run_in_threadpool(self._credentials.of_link, path.removeprefix(SHARED).partition("/")[0])
            if found is None:
                raise HTTPException(404)
            return found
        if path in OPEN_PATHS or path.startswith(OPEN_FOLDERS):
            return None
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and (found := await run_in_threadpool(self._credentials.of_token, given.strip())):
            return found
        cookie = request.cookies.get(COOKIE, "")
        found = await run_in_threadpool(self._credentials.of_cookie, cookie) if cookie else None
        if found is None:
            text = (
                "send the header Authorization: Bearer TOKEN (computeshare token prints the token on its own machine)"
            )
            raise problem(401, "Not logged in", text, {"www-authenticate": "Bearer"})
        if request.method not in READS and not _same_origin(request):
            text = "browsers may send this request from ComputeShare's own pages only"
            raise problem(403, "Another site's request", text)
        return found

    def _check_right(self, request: Request, caller: Caller | None) -> None:
        """Raises a refusal: the caller lacks the scope, or sends too many requests."""
        if caller is None or caller is OWNER:
            return
        method, path = request.method, request.scope["path"]
        if caller.job_id is None and (status := refused_with(caller, method, path)):
            if status == 404:
                raise HTTPException(404)
            text = f"the token {caller.name} has no scope {needed(method, path)}: ask for a token that has it"
            raise problem(403, "Not allowed", text)
        self._check_wait(self._requests.wait_s(caller.id), "too many requests with this token or link")
        if self._answering[caller.id] >= AT_ONCE:
            text = f"this token or link has {AT_ONCE} requests open already: close some first"
            raise problem(429, "Too many requests", text, {"retry-after": "5"})
        self._requests.take(caller.id)

    def _check_wait(self, wait_s: float, why: str) -> None:
        if wait_s > 0:
            seconds = str(math.ceil(wait_s))
            raise problem(429, "Too many requests", f"{why}: try again in {seconds} s", {"retry-after": seconds})

    def _is_own_name(self, host: str) -> bool:
        name = _name_of(host)
        return bool(name) and (name in self._hosts or (self._any_address and _is_address(str(name))))


def _name_of(host: str) -> str | None:
    """The name in a Host header, without the port; None if the header is malformed."""
    try:
        parts = urlsplit(f"//{host}")
        name = (parts.hostname or "").lower()
    except ValueError:
        return None
    return name if parts.netloc == host else None


def _is_try(scope: Scope) -> bool:
    """Whether a request presents a login key, an invite's code or a link's code."""
    path = str(scope["path"])
    return path.startswith(("/join/", SHARED)) or (path == "/login" and b"key=" in scope.get("query_string", b""))


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
    """Whether a request is from this server's own page, by the headers that every browser sends with a change."""
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is not None:
        return site in ("same-origin", "none")
    return origin is not None and urlsplit(origin).netloc == request.headers.get("host")
