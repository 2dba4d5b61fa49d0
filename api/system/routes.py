"""The routes of health checks, metrics, version, login, and the list of routes."""

import re
from typing import Annotated
from urllib.parse import parse_qsl, urlsplit

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from api.deps import HealthDep, ServicesDep, TelemetryDep
from api.http.security import COOKIE
from api.pages.page_response import render
from api.schemas import Health, Readiness, Release
from computeshare.protocol.handshake import OURS

YEAR_S = 365 * 24 * 3600
_OWN_PAGE = re.compile(r"/[\w-][\w/?=&.-]*", re.ASCII)

router = APIRouter(tags=["system"])


@router.get("/healthz")
def healthz() -> Health:
    """Whether this process answers; always ok."""
    return Health(status="ok")


@router.get("/readyz", responses={503: {"model": Readiness}})
def readyz(service: HealthDep, response: Response) -> Readiness:
    """Whether jobs can run, with the error of each dependency; 503 if not."""
    readiness = service.check()
    if readiness.status != "ready":
        response.status_code = 503
        response.headers["Retry-After"] = "2"
    return readiness


@router.get("/v1/version")
def release() -> Release:
    """The control plane's version and protocol, which clients and workers compare with their own."""
    return Release(version=OURS.version, protocol=OURS.protocol)


@router.get("/metrics", response_class=Response)
def prometheus(telemetry: TelemetryDep) -> Response:
    """Metrics for Prometheus."""
    return Response(generate_latest(telemetry.registry), headers={"content-type": CONTENT_TYPE_LATEST})


@router.get("/login", response_class=HTMLResponse, responses={303: {"description": "logged in; redirects to the page"}})
def login(
    request: Request,
    services: ServicesDep,
    key: Annotated[str, Query(max_length=2000, description="the login link's key, or the whole link")] = "",
    following: Annotated[
        str, Query(alias="next", max_length=200, description="page of this server to go to after the login")
    ] = "/",
) -> Response:
    """Log a browser in: check the login link's key, set the cookie, and redirect to the page."""
    given = dict(parse_qsl(urlsplit(key.strip()).query)).get("key", key.strip())
    found = services.credentials.login(given) if given else None
    if found is None:
        return login_page(request, bool(key))
    caller, cookie = found
    address = request.client.host if request.client else ""
    services.audit.add("login", caller.id, (caller, address))
    response = RedirectResponse(following if _OWN_PAGE.fullmatch(following) else "/", 303)
    response.set_cookie(COOKIE, cookie, max_age=YEAR_S, httponly=True, samesite="lax", secure=_is_https(request))
    return response


@router.post("/logout", response_class=RedirectResponse, status_code=303)
def logout(request: Request) -> RedirectResponse:
    """Log this browser out: remove its cookie, and redirect to the login page."""
    response = RedirectResponse("/login", 303)
    response.delete_cookie(COOKIE, httponly=True, samesite="lax", secure=_is_https(request))
    return response


def _is_https(request: Request) -> bool:
    return request.url.scheme == "https"


def login_page(request: Request, wrong: bool = False) -> HTMLResponse:
    """The login page (401), which leads on to the requested page; `wrong`: the last try had a wrong key."""
    asked = f"{request.url.path}?{request.url.query}".removesuffix("?")
    following = request.query_params.get("next", "") if request.url.path == "/login" else asked
    following = following if request.method == "GET" and _OWN_PAGE.fullmatch(following) else ""
    page = render(request, "login.html", 401, wrong=wrong, following=following)
    page.headers["www-authenticate"] = "Bearer"
    return page


@router.get("/docs", response_class=HTMLResponse, include_in_schema=False)
def docs(request: Request) -> HTMLResponse:
    """The REST routes as a plain table, without scripts from other servers."""
    routes = [
        {"method": method.upper(), "path": path, "about": about.get("description") or about.get("summary", "")}
        for path, methods in request.app.openapi()["paths"].items()
        for method, about in methods.items()
    ]
    return render(request, "api.html", routes=routes)
