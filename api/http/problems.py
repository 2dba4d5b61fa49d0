"""Answers errors as RFC 9457 problem documents; `CODES` maps errors to HTTP codes."""

import re
from collections.abc import Mapping
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi_problem.error import Problem
from fastapi_problem.handler import ExceptionHandler, add_exception_handler, new_exception_handler
from pydantic import BaseModel
from redis.exceptions import RedisError
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from starlette.exceptions import HTTPException

from api.errors import Conflict, InvalidFields, KeyReused, NotFound
from computeshare.errors import (
    ArtifactError,
    BrokerError,
    BundleError,
    BundleMissing,
    DatabaseDamaged,
    DatabaseLost,
    DatasetError,
    NoEvaluator,
    PieceDamaged,
    SettingsError,
    SpecError,
)
from computeshare.jobspec.part import plain_errors
from computeshare.jobspec.spec import JobSpec, fields_beside

RETRY_AFTER_S = 2
DEEPEST = 10
"""The most parts of a field's place in an answer: a part of it that lies deeper is not named."""
LONGEST = 4000
"""The most characters of a message in an answer: a message may repeat a part of the request."""

log = structlog.get_logger()


CODES: Mapping[type[Exception], tuple[int, str]] = {
    NotFound: (404, "Not found"),
    Conflict: (409, "Not possible in this status"),
    KeyReused: (422, "This Idempotency-Key belongs to another job"),
    SpecError: (422, "The request cannot be carried out"),
    ArtifactError: (503, "The checkpoint's files cannot be read or written"),
    OverflowError: (422, "A number is out of range"),
    BundleMissing: (404, "Not found"),
    PieceDamaged: (422, "The bytes are not the piece's"),
    BundleError: (503, "The bundle's files cannot be read or written"),
    DatasetError: (503, "The data set's files cannot be read"),
    NoEvaluator: (503, "No evaluator answers"),
    SettingsError: (503, "The broker is not known"),
    BrokerError: (503, "The broker cannot be reached"),
    RedisError: (503, "The broker cannot be reached"),
    DatabaseDamaged: (503, "The database is damaged"),
    DatabaseLost: (503, "The database file is gone"),
    OperationalError: (503, "The database cannot be used now"),
}
"""HTTP code and title of every error that a route may raise. A 503 has a Retry-After header. Any other error is a
bug and answered with 500."""


def install(app: FastAPI) -> None:
    """Make the application answer every error with a problem document."""
    handler = new_exception_handler(
        unhandled_wrappers={"default": _unhandled},  # type: ignore[dict-item]
        handlers={InvalidFields: _invalid, **dict.fromkeys(CODES, _known)},
        pre_hooks=[_report],
        request_validation_handler=_invalid,
    )
    add_exception_handler(app, handler, generic_swagger_defaults=False)
    for kind in (*CODES, InvalidFields):
        app.add_exception_handler(kind, handler)


def problem(status: int, title: str, detail: str, headers: dict[str, str] | None = None) -> Problem:
    """A problem whose type is its title in kebab case."""
    kind = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    return Problem(title, type_=kind, detail=_clean(detail), status=status, headers=headers)


def _known(_handler: ExceptionHandler, _request: Request, error: Exception) -> Problem:
    status, title = next(CODES[kind] for kind in type(error).__mro__ if kind in CODES)
    text = str(error.orig) if isinstance(error, OperationalError) else str(error)
    return problem(status, title, text, {"retry-after": str(RETRY_AFTER_S)} if status == 503 else None)


def _unhandled(_text: str) -> Problem:
    return problem(500, "Internal error", "This is a bug in ComputeShare: see the traceback in the control plane's log")


def _report(request: Request, error: Exception) -> None:
    expected = (*CODES, HTTPException, Problem, RequestValidationError)
    if not isinstance(error, expected) or (isinstance(error, SQLAlchemyError) and not _passing(error)):
        path = getattr(request.scope.get("route"), "path", "no route")  # the request's own may hold the code of a link
        log.error("unexpected error", method=request.method, path=path, exc_info=error)


def _passing(error: Exception) -> bool:
    return "locked" in str(error) or "full" in str(error)


def _invalid(_handler: ExceptionHandler, request: Request, error: Any) -> Problem:
    """A 422 that names each wrong field with a JSON pointer and the allowed values. Values of the request are not
    repeated.
    """
    errors = [_field_error(e, _body_of(request)) for e in plain_errors(error.errors())]
    detail = "; ".join(f"{e['field']}: {e['detail']}" if e["field"] else e["detail"] for e in errors[:5])
    invalid = problem(422, "The request is not valid", detail)
    invalid.extras["errors"] = errors
    return invalid


def _body_of(request: Request) -> type[BaseModel]:
    """The pydantic model of this route's request body."""
    field = getattr(request.scope.get("route"), "body_field", None)
    model = field.field_info.annotation if field else None
    return model if isinstance(model, type) and issubclass(model, BaseModel) else JobSpec


def _field_error(error: Mapping[str, Any], body: type[BaseModel]) -> dict[str, str]:
    place, *path = error["loc"] or ("body",)
    unreadable = error["type"] == "json_invalid"  # its path is the place in the text
    parts = [] if unreadable else [_clean(str(part)) for part in path[:DEEPEST]]
    message = _clean(str(error["msg"]))
    if error["type"] == "extra_forbidden":
        allowed = fields_beside(path[1:]) if path[:1] == ["spec"] else fields_beside(path, body)
        message = f"unknown field; allowed: {', '.join(allowed)}"
    elif place == "body" and not path and (error["type"] == "missing" or isinstance(error.get("input"), bytes)):
        message = "send a JSON object, with the header Content-Type: application/json"
    if place == "body" and parts in ([], ["spec"]) and not unreadable and (named := _named_in(message)):
        parts = [*parts, named]
    answer = {"in": str(place), "field": "body" if unreadable else ".".join(parts), "detail": message}
    if place == "body":
        answer["pointer"] = "".join("/" + part.replace("~", "~0").replace("/", "~1") for part in parts)
    if expected := (error.get("ctx") or {}).get("expected"):
        answer["allowed"] = _clean(str(expected))
    return answer


def _named_in(message: str) -> str | None:
    """The field that an error of the whole specification is about: the first field that its message names."""
    return next((word for word in re.findall(r"\w+", message) if word in JobSpec.model_fields), None)


def _clean(text: str) -> str:
    return text[:LONGEST].encode("utf-8", "replace").decode()
