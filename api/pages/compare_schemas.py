"""The REST API's schemas of a comparison of jobs."""

from typing import Any

from pydantic import BaseModel, Field

from api.schemas import OnTestSet
from computeshare.jobspec.tasks.facts import Metric
from computeshare.types import JobStatus


class ComparedJob(BaseModel):
    """The results of one of the compared jobs; bytes are sums over its workers."""

    id: str
    title: str
    status: JobStatus
    version: int
    rounds_total: int
    metric: Metric
    best_accuracy: float | None
    best_loss: float | None
    best_version: int | None
    accuracy: float | None
    test_loss: float | None
    perplexity: float | None
    tested: OnTestSet | None
    lowest_test_loss: float | None
    loss: float | None
    bytes_up: int
    bytes_down: int
    accepted: int
    dropped: int = Field(description="submissions that did not count")
    seconds: float | None = Field(
        description="seconds from the first worker's joining to the job's end or to now, without pauses"
    )


class Comparison(BaseModel):
    """A comparison of jobs, in the requested order."""

    items: list[ComparedJob]
    differences: dict[str, list[Any]] = Field(
        description="by dotted field of the JobSpec: its value in each job, if the jobs differ in it; without `name`"
    )
