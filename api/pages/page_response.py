"""Renders templates as HTML answers, and errors as pages for browsers."""

import json
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import HTMLResponse, Response
from fastapi.routing import APIRoute
from fastapi.templating import Jinja2Templates
from fastapi_problem.handler import ExceptionHandler
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from api import text_format
from api.access.caller import Caller
from api.deps import ServicesDep
from api.errors import NotFound
from api.jobs.cursors import BadCursor
from api.pages import explanations
from api.pages.shared_view import shared_events
from api.pages.views import Views, elapsed_s
from computeshare.types import ENDED


def _views(services: ServicesDep) -> Views:
    parts = (services.jobs, services.history, services.submissions, services.recipes)
    return Views(services.database, *parts, services.control.trouble)


ViewsDep = Annotated[Views, Depends(_views)]


def render(request: Request, template: str, status_code: int = 200, **context: Any) -> HTMLResponse:
    caller: Caller | None = getattr(request.state, "caller", None)
    context |= {"now": datetime.now(UTC), "here": template.removesuffix(".html"), "caller": caller}
    context["may"] = caller.may if caller else lambda _scope: False
    return _templates.TemplateResponse(request, template, context, status_code=status_code)


def missing(request: Request, heading: str, text: str, status_code: int = 404) -> HTMLResponse:
    """An error page with a heading and an explanation."""
    return render(request, "error.html", status_code, heading=heading, text=text)


def capital(text: str) -> str:
    """A text that begins with a capital letter."""
    return text[:1].upper() + text[1:]


class PageRoute(APIRoute):
    """A page that explains itself where there is no such job, or no such page of a list."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.response_class is not HTMLResponse:
            return handle

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except NotFound as error:
                heading, _, reason = error.what.partition(": ")
                text = f"{capital(reason)}." if reason else "It may have been deleted."
                return missing(request, capital(heading), text)
            except BadCursor as error:
                return missing(request, "There is no such page", str(error))

        return answer


def for_browsers(app: FastAPI) -> None:
    """Answer errors on pages with an HTML page where the client accepts HTML; other clients and `/v1/` get problem
    documents.
    """
    for kind, handler in list(app.exception_handlers.items()):
        if isinstance(handler, ExceptionHandler):
            app.exception_handlers[kind] = _as_page(handler)


def _as_page(handler: Callable[..., Any]) -> Callable[[Request, Exception], Response]:
    def answer(request: Request, error: Exception) -> Response:
        told: Response = handler(request, error)
        if request.url.path.startswith("/v1/") or "text/html" not in request.headers.get("accept", ""):
            return told
        title, detail = (json.loads(bytes(told.body)).get(name, "") for name in ("title", "detail"))
        if detail == title == "Not Found":
            title, detail = "Page not found", f"There is no page {request.url.path}."
        page = missing(request, title, detail, told.status_code)
        if after := told.headers.get("retry-after"):
            page.headers["retry-after"] = after
        return page

    return answer


def _environment() -> Environment:
    loader = FileSystemLoader(Path(__file__).parent / "templates")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    for words in (
        explanations.advice,
        explanations.groups_of,
        explanations.may_help_to_retry,
        explanations.runs,
        explanations.why,
        shared_events,
        elapsed_s,
        text_format.ago,
        text_format.until,
        text_format.count,
        text_format.done,
        text_format.duration,
        text_format.epsilon,
        text_format.ledger_line,
        text_format.loss,
        text_format.moment,
        text_format.percent,
        text_format.score,
        text_format.plural,
        text_format.bars,
        text_format.polyline,
        text_format.rate,
        text_format.share,
        text_format.size,
        text_format.spec_value,
        text_format.tested,
        text_format.tested_of,
        text_format.told,
        text_format.unit_of,
    ):
        environment.filters[words.__name__] = words
    environment.tests["ended"] = ENDED.__contains__
    return environment


_templates = Jinja2Templates(env=_environment())
