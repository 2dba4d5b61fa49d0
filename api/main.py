"""The application: routes, middleware, background loops. Importing this module starts nothing."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.middleware.body_limit import RequestBodyLimitMiddleware

from api.access import link_routes as access_links
from api.access import page_routes as access_pages
from api.access import routes as access
from api.bundles import routes as bundles
from api.datasets import page_routes as dataset_pages
from api.datasets import routes as datasets
from api.deps import Services
from api.fleet import invite_routes, wheel_routes, worker_routes
from api.fleet import routes as fleet
from api.http import problems
from api.http.body_deadline import BodyDeadline
from api.http.compression import Compress
from api.http.request_metrics import Measure
from api.http.security import MAX_BODY_BYTES, OPEN_FOLDERS, OPEN_PATHS, Guard, allowed_hosts
from api.http.server import make_room_for_connections, serve_both, server_of
from api.http.tls import Certificate
from api.jobs import event_routes
from api.jobs import routes as jobs
from api.logs import routes as logs
from api.pages import compare_routes, job_routes, new_job_routes, shared_routes
from api.pages import routes as pages
from api.pages.page_response import for_browsers
from api.recipes import routes as recipes
from api.schemas import PROBLEMS
from api.system import routes as system
from api.text import routes as text
from api.webhooks import page_routes
from api.webhooks import routes as webhooks
from computeshare import __version__
from computeshare.settings import Settings

ROUTES = (
    jobs,
    worker_routes,
    text,
    event_routes,
    logs,
    fleet,
    invite_routes,
    wheel_routes,
    webhooks,
    recipes,
    bundles,
    access,
    access_links,
    datasets,
    system,
    pages,
    new_job_routes,  # before the jobs' pages: /jobs/new is no job
    job_routes,
    compare_routes,
    page_routes,
    access_pages,
    shared_routes,
    dataset_pages,
)


def create_app(settings: Settings, host: str = "127.0.0.1", hosts: Iterable[str] = ()) -> FastAPI:
    """The control plane as an ASGI application.

    Args:
        host: the address that the server binds to. A request's Host header must name this address, a loopback name,
            the host of the setting `url`, or a name in `hosts`.
    """
    services = Services(settings)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await run_in_threadpool(services.start)
        try:
            yield
        finally:
            await run_in_threadpool(services.stop)

    app = FastAPI(
        title="ComputeShare",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses=PROBLEMS,
    )
    app.state.services = services
    app.openapi = partial(_documented, app.openapi)  # type: ignore[method-assign]
    for module in ROUTES:
        app.include_router(module.router)
    app.mount("/static", StaticFiles(directory=Path(__file__).parent / "pages" / "static"), name="static")
    problems.install(app)
    for_browsers(app)
    app.add_middleware(Compress)
    app.add_middleware(BodyDeadline)
    app.add_middleware(RequestBodyLimitMiddleware, max_body_size=MAX_BODY_BYTES)
    named = [urlsplit(url).hostname or "" for url in (settings.url, settings.resolve_public_url()) if url]
    own = allowed_hosts(host, [*named, *hosts])
    explain = partial(_explained, app)
    app.add_middleware(
        Guard,
        credentials=services.credentials,
        hosts=own,
        login_page=system.login_page,
        explain=explain,
        gateway=services.gateway,
    )
    app.add_middleware(Measure, telemetry=services.telemetry)
    return app


def _explained(app: FastAPI, request: Request, error: Exception) -> Response:
    """The answer to an error, the same as if a route had raised it."""
    found: Response = app.exception_handlers[HTTPException](request, error)  # type: ignore[assignment]
    return found


def _documented(openapi: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The OpenAPI document, with the token that all routes need but the open ones."""
    document = openapi()
    document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"token": []}]
    for path, operations in document["paths"].items():
        if path in OPEN_PATHS or path.startswith(OPEN_FOLDERS):
            for operation in operations.values():
                operation["security"] = []
    return document


def run(settings: Settings, host: str, port: int) -> None:
    """Serve until a signal ends the process."""
    app = create_app(settings, host)
    make_room_for_connections()
    server = server_of(app, host=host, port=port)
    services: Services = app.state.services
    services.stopping = lambda: server.should_exit  # streams end by themselves instead of being waited for
    if certificate := Certificate.of(settings):
        files = {"ssl_certfile": certificate.certificate, "ssl_keyfile": certificate.key}
        secure = server_of(app, host="0.0.0.0", port=settings.tls_port, lifespan="off", **files)
        asyncio.run(serve_both(server, secure))
    else:
        server.run()
