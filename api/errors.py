"""Why the control plane cannot do what was asked; `api/http/problems.py` has the HTTP codes."""

from collections.abc import Mapping, Sequence
from typing import Any

from computeshare.errors import ComputeShareError, SpecError


class NotFound(ComputeShareError):
    """No such job, checkpoint or page."""


class Conflict(ComputeShareError):
    """The job's status forbids it."""


class KeyReused(ComputeShareError):
    """An `Idempotency-Key` came again with another body."""


class InvalidFields(SpecError):
    """Fields of a request that cannot be carried out, as pydantic tells errors."""

    def __init__(self, errors: Sequence[Mapping[str, Any]]) -> None:
        super().__init__("; ".join(str(error["msg"]) for error in errors))
        self._errors = errors

    def errors(self) -> Sequence[Mapping[str, Any]]:
        return self._errors
