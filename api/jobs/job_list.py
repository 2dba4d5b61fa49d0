"""Filters and orders of the list of jobs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import case, func, select
from sqlmodel import col

from api.tables import Job
from computeshare.types import JobSort, JobStatus

_CREATED, _ID = col(Job.created_ms), col(Job.id)
_SPEC: Any = col(Job.spec)
_DIGEST_OR_NAME = _SPEC["recipe"].as_string()
_RECIPE = case(
    (_DIGEST_OR_NAME.like("package:%"), func.substr(_DIGEST_OR_NAME, 9)), else_=func.substr(_DIGEST_OR_NAME, 8, 8)
)
_MODEL = func.coalesce(_SPEC["model"].as_string(), "recipe " + _RECIPE)
_DEFAULT_TITLE = _MODEL + func.coalesce(" on " + _SPEC["dataset"].as_string(), "")  # as `subject_of`
_TITLE = case((col(Job.name) != "", col(Job.name)), else_=_DEFAULT_TITLE)


@dataclass(frozen=True, slots=True)
class ListOrder:
    """An order of the list: its columns, of which the last is unique, and each column's Python type, for cursors."""

    columns: tuple[Any, ...]
    kinds: tuple[type, ...]


ORDERS: Mapping[JobSort, ListOrder] = {
    "newest": ListOrder((_CREATED.desc(), _ID.desc()), (int, str)),
    "oldest": ListOrder((_CREATED, _ID), (int, str)),
    "name": ListOrder((func.casefold(_TITLE), _CREATED.desc(), _ID.desc()), (str, int, str)),
    "accuracy": ListOrder(
        (func.coalesce(col(Job.accuracy), -1.0).desc(), _CREATED.desc(), _ID.desc()), (float, int, str)
    ),
    "updated": ListOrder((col(Job.updated_ms).desc(), _ID.desc()), (int, str)),
}
"""The orders by name. `accuracy`: the last scored version's, best first, jobs without a score at the end."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A filter of jobs: by statuses (empty: any), queue, a text that the title contains or the id equals, and tag."""

    statuses: Sequence[JobStatus] = ()
    queue: str | None = None
    search: str = ""
    tag: str = ""

    def among(self, query: Any) -> Any:
        """The `Select` of jobs with this filter applied."""
        if self.statuses:
            query = query.where(col(Job.status).in_(self.statuses))
        if self.queue is not None:
            query = query.where(col(Job.queue) == self.queue)
        if text := self.search.strip().casefold():
            query = query.where((func.instr(func.casefold(_TITLE), text) > 0) | (text == _ID))
        if self.tag:
            tags = func.json_each(_SPEC, "$.tags").table_valued("value")
            query = query.where(select(tags.c.value).where(tags.c.value == self.tag).exists())
        return query
