"""Compares jobs: their results and the differences of their specifications. Pure."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, get_args

from api.jobs.series import Lowest
from api.pages.compare_schemas import ComparedJob, Comparison
from api.pages.views import elapsed_s
from api.schemas import JobPublic
from computeshare.jobspec.documents.differences import differences
from computeshare.jobspec.documents.fields import editable
from computeshare.types import Outcome


def compared(jobs: Sequence[JobPublic], lowest: Sequence[Lowest | None], now: datetime) -> Comparison:
    """The comparison of jobs; `lowest` are their lowest test losses, in the same order."""
    items = [_result(job, loss, now) for job, loss in zip(jobs, lowest, strict=True)]
    return Comparison(items=items, differences=differing([job.spec for job in jobs]))


def differing(specs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The fields in which specifications differ, as a dotted name to the values in each. Fields that only describe a
    job, such as its name, are left out.
    """
    described = editable("always")
    return differences([{name: value for name, value in spec.items() if name not in described} for spec in specs])


def _result(job: JobPublic, lowest: Lowest | None, now: datetime) -> ComparedJob:
    dropped = sum(getattr(job, outcome) for outcome in get_args(Outcome) if outcome != "accepted")
    counted = {"dropped": dropped, "seconds": elapsed_s(job, now) if job.started_at else None}
    told = {name: value for name, value in job.model_dump().items() if name in ComparedJob.model_fields}
    return ComparedJob.model_validate(told | counted | {"lowest_test_loss": lowest.value if lowest else None})
