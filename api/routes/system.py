"""Health, figures, login, and the list of routes."""

import re
from html import escape
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from api.deps import HealthDep, ServicesDep, TelemetryDep
from api.schemas import Health, Readiness, Release
from api.security import COOKIE, LOGIN_PAGE, matches
from computeshare.handshake import OURS
from computeshare.settings import derive

YEAR_S = 365 * 24 * 3600
_OWN_PAGE = re.compile(r"/[\w-][\w/?=&.-]*", re.ASCII)

router = APIRouter(tags=["system"])


@router.get("/healthz")
def healthz() -> Health:
    """This process answers."""
    return Health(status="ok")


@router.get("/readyz", responses={503: {"model": Readiness}})
def readyz(service: HealthDep, response: Response) -> Readiness:
    """Whether jobs can run, and what is wrong where they cannot."""
    readiness = service.check()
    if readiness.status != "ready":
        response.status_code = 503
        response.headers["Retry-After"] = "2"
    return readiness


@router.get("/v1/version")
def release() -> Release:
    """What this control plane runs: clients and workers compare it with what they are."""
    return Release(version=OURS.version, protocol=OURS.protocol)


@router.get("/metrics", response_class=Response)
def prometheus(telemetry: TelemetryDep) -> Response:
    """Figures for Prometheus."""
    return Response(generate_latest(telemetry.registry), headers={"content-type": CONTENT_TYPE_LATEST})


@router.get("/login", response_class=HTMLResponse, responses={303: {"description": "logged in: on to the page"}})
def login(
    services: ServicesDep,
    key: Annotated[str, Query(max_length=200)] = "",
    following: Annotated[str, Query(alias="next", max_length=200, description="page to go to, on this server")] = "/",
) -> Response:
    """Give a browser that came by the login link its cookie."""
    if not matches(key, derive(services.token, "login")):
        return HTMLResponse(LOGIN_PAGE, 401)
    response = RedirectResponse(following if _OWN_PAGE.fullmatch(following) else "/", 303)
    response.set_cookie(
        COOKIE, derive(services.token, "cookie"), max_age=YEAR_S, httponly=True, samesite="lax", path="/"
    )
    return response


@router.get("/docs", response_class=HTMLResponse, include_in_schema=False)
def docs(request: Request) -> HTMLResponse:
    """The routes, as a plain table: nothing is fetched from elsewhere."""
    rows = [
        f"<tr><td>{method.upper()}</td><td><code>{escape(path)}</code></td>"
        f"<td>{escape(about.get('description') or about.get('summary', ''))}</td></tr>"
        for path, methods in request.app.openapi()["paths"].items()
        for method, about in methods.items()
    ]
    return HTMLResponse(
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>ComputeShare: REST</title><h1>REST</h1><p>The schemas are in <a href='/openapi.json'>openapi.json</a>."
        f"</p><table><tr><th>Method</th><th>Path</th><th></th></tr>{''.join(rows)}</table></html>"
    )
