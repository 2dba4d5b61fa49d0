"""Jobs side by side: in what their specifications differ, and what came of each. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from api.schemas import JobPublic, Metrics
from computeshare.comparing import differences


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a job; `bytes` are those of all its workers, up and down, `elapsed_s` from the first worker on."""

    job: JobPublic
    lowest_loss: float | None
    bytes: int
    elapsed_s: float


def result(job: JobPublic, metrics: Metrics, now: datetime) -> Result:
    """Of one job, with its series."""
    losses = [point.value for point in metrics.test_loss]
    return Result(
        job=job,
        lowest_loss=min(losses, default=None),
        bytes=job.bytes_up + job.bytes_down,
        elapsed_s=((job.finished_at or now) - job.started_at).total_seconds() if job.started_at else 0.0,
    )


def differing(specs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Dotted field to its value in each specification, as text, where they are not all the same; the names aside."""
    nameless = [{name: value for name, value in spec.items() if name != "name"} for spec in specs]
    return {name: [_text(value) for value in values] for name, values in differences(nameless).items()}


def _text(value: Any) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value)
