"""A checkpoint's score on one part of the data, as machines tell it to one another. Imports no torch."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from computeshare.jobspec.tasks.facts import Metric
from computeshare.tasks.class_counts import ClassCounts

ScoredPart = Literal["validation", "test"]


class PartScore(BaseModel):
    """The mean loss and the mean of each metric over `samples` samples; a classifier's counts by class; a short text by
    a language model, where versions are compared by this part.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    loss: float
    metrics: dict[str, float]
    samples: int = Field(ge=1)
    classes: ClassCounts | None = None
    sample: str | None = None


def document_of(score: PartScore, metric: Metric) -> dict[str, Any]:
    """A score as `score.json` and the event hold it: versions are compared by `accuracy`, else by `loss`. Pure.

    Args:
        metric: by which the job's versions are compared.
    """
    own: Mapping[str, float] = score.metrics
    compared = {"accuracy": own["accuracy"]} if metric == "accuracy" else {}
    own = {name: value for name, value in own.items() if name not in compared}
    found: dict[str, Any] = {"loss": score.loss, **compared, "samples": score.samples}
    return found | ({"own_metrics": own} if own else {}) | ({"sample": score.sample} if score.sample else {})
