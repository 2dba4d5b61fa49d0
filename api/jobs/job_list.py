"""Which jobs a list holds, and in which order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import case, func
from sqlmodel import col

from api.tables import Job
from computeshare.types import JobSort, JobStatus

_CREATED, _ID = col(Job.created_ms), col(Job.id)
_SPEC: Any = col(Job.spec)
_DEFAULT_TITLE = _SPEC["model"].as_string() + " on " + _SPEC["dataset"].as_string()
_TITLE = case((col(Job.name) != "", col(Job.name)), else_=_DEFAULT_TITLE)


@dataclass(frozen=True, slots=True)
class Order:
    """What a list is ordered by: columns, the last of them unique, and the Python type of each for its cursors."""

    columns: tuple[Any, ...]
    kinds: tuple[type, ...]


ORDERS: Mapping[JobSort, Order] = {
    "newest": Order((_CREATED.desc(), _ID.desc()), (int, str)),
    "oldest": Order((_CREATED, _ID), (int, str)),
    "name": Order((func.casefold(_TITLE), _CREATED.desc(), _ID.desc()), (str, int, str)),
    "accuracy": Order((func.coalesce(col(Job.accuracy), -1.0).desc(), _CREATED.desc(), _ID.desc()), (float, int, str)),
    "updated": Order((col(Job.updated_ms).desc(), _ID.desc()), (int, str)),
}
"""`accuracy` is that of the version scored last, the best first; jobs without one come last."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which jobs are listed: of these statuses (empty: any), of a queue, with a text in their title or id."""

    statuses: Sequence[JobStatus] = ()
    queue: str | None = None
    search: str = ""

    def among(self, query: Any) -> Any:
        """A `Select` of jobs, narrowed down to these."""
        if self.statuses:
            query = query.where(col(Job.status).in_(self.statuses))
        if self.queue is not None:
            query = query.where(col(Job.queue) == self.queue)
        if text := self.search.strip().casefold():
            query = query.where((func.instr(func.casefold(_TITLE), text) > 0) | (text == _ID))
        return query
