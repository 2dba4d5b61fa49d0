"""Errors of the control plane's requests; `api/http/problems.py` maps them to HTTP codes."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from computeshare.errors import ComputeShareError, SpecError


class NotFound(ComputeShareError):
    """There is no such job, checkpoint, worker, webhook or page: `what` says so, without the command that lists all."""

    def __init__(self, what: str, listed_by: str = "") -> None:
        super().__init__(f"{what}: `{listed_by}` lists all" if listed_by else what)
        self.what = what


def no_job(job_id: str) -> NotFound:
    """The error of a job's id that no job has."""
    return NotFound(f"there is no job {job_id}", "computeshare jobs list")


class Conflict(ComputeShareError):
    """The present state forbids the request, such as pausing a job that has ended."""


class KeyReused(ComputeShareError):
    """An `Idempotency-Key` was used again with another body."""


class InvalidFields(SpecError):
    """Invalid fields of a request; `errors` are in pydantic's form (`loc`, `msg`, `type`)."""

    def __init__(self, errors: Sequence[Mapping[str, Any]]) -> None:
        super().__init__("; ".join(str(error["msg"]) for error in errors))
        self._errors = errors

    @classmethod
    def at(cls, message: str, *field: str) -> "InvalidFields":
        """One field of the body, by its path, with its message."""
        return cls([{"type": "value_error", "loc": ("body", *field), "msg": message}])

    @classmethod
    def of(cls, error: ValidationError, *within: str) -> "InvalidFields":
        """The fields of a model that lies in the body at the path `within`."""
        found = error.errors(include_url=False)
        return cls([{**one, "loc": ("body", *within, *one["loc"])} for one in found])

    def errors(self) -> Sequence[Mapping[str, Any]]:
        return self._errors
