"""Every route of the control plane, by the router's own list and by the OpenAPI document."""

import re
from collections.abc import Iterator, Mapping

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.routing import Route

from api.main import ROUTES


def routes(app: FastAPI) -> Iterator[tuple[str, str]]:
    """Method and path template of each route: of the application's modules, of the application, of its document."""
    found = {
        (method, route.path)
        for module in ROUTES
        for route in module.router.routes
        if isinstance(route, APIRoute)
        for method in route.methods
    }
    found |= {
        (method, route.path) for route in app.routes if isinstance(route, Route) for method in route.methods or ()
    }
    found |= {(method.upper(), path) for path, methods in app.openapi()["paths"].items() for method in methods}
    yield from sorted(found)


def filled(path: str, values: Mapping[str, str], otherwise: str = "abcdefgh") -> str:
    """A route's path with values in its places."""
    return re.sub(r"{(\w+)(?::\w+)?}", lambda place: values.get(place[1], otherwise), path)
