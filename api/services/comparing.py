"""Jobs side by side: in what their specifications differ, and what came of each. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from api.schemas import JobPublic
from api.services.series import Lowest
from api.services.views import elapsed_s
from computeshare.comparing import differences


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a job; `bytes` are those of all its workers, up and down, `elapsed_s` leaves pauses out."""

    job: JobPublic
    lowest_loss: float | None
    bytes: int
    elapsed_s: float


def result(job: JobPublic, lowest: Lowest | None, now: datetime) -> Result:
    """Of one job, with its lowest test loss."""
    traffic = job.bytes_up + job.bytes_down
    return Result(job, lowest.value if lowest else None, traffic, elapsed_s(job, now))


def differing(specs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Dotted field to its value in each specification, as text, where they are not all the same; the names aside."""
    nameless = [{name: value for name, value in spec.items() if name != "name"} for spec in specs]
    return {name: [_text(value) for value in values] for name, values in differences(nameless).items()}


def _text(value: Any) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value)
