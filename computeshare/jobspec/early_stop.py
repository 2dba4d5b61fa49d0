"""Early stopping: the version with whose score a job is complete. Pure."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from computeshare.jobspec.controls import MORE, Control
from computeshare.jobspec.part import Part, error_at
from computeshare.jobspec.tasks.facts import goodness


class Stop(Part):
    """When a job is complete before its last round: once a score is reached, or none has been better for a while."""

    metric: Annotated[Literal["accuracy", "loss"] | None, Control(MORE, "--stop-metric")] = Field(
        None, title="Early stopping: metric", description="the score that must reach `at`"
    )
    at: Annotated[float | None, Control(MORE, "--stop-at")] = Field(
        None,
        title="Early stopping: value",
        description="complete with the first version whose accuracy is at least, or whose loss is at most, this",
    )
    patience: Annotated[int | None, Control(MORE, "--patience")] = Field(
        None,
        title="Early stopping: patience",
        ge=1,
        le=1_000_000,
        description="complete once so many scored versions in a row were not better than the best",
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.metric is None) != (self.at is None):
            raise ValueError('stop needs metric and at together, for example {"metric": "accuracy", "at": 0.98}')
        if self.at is None and self.patience is None:
            raise ValueError("stop needs metric and at, or patience")
        if self.at is not None and not math.isfinite(self.at):
            raise ValueError("stop's at must be a finite number")
        if self.metric == "accuracy" and not 0 < (self.at or 0) <= 1:
            raise error_at("Stop", "at", f"must be a fraction above 0, at most 1, not {self.at:g}: 0.98 is 98 %")
        return self

    def decide(self, scores: Mapping[int, Mapping[str, Any]], every: int) -> tuple[int, str] | None:
        """The version with which the job is complete, and why; None: it goes on.

        Args:
            scores: `loss` and, for a classifier, `accuracy` by version. Scores other than the best may be missing.
            every: versions from one score to the next.
        """
        best, best_version = -math.inf, 0
        for version in sorted(scores):
            score = scores[version]
            if self.metric and self._reached(score):
                return version, f"{self.metric} {score[self.metric]:.4g} at version {version} reached {self.at:g}"
            value = goodness(score)
            if best_version == 0 or value > best:
                best, best_version = value, version
            elif self.patience and (version - best_version) // every >= self.patience:
                return version, f"no version up to {version} was better than version {best_version}"
        return None

    def _reached(self, score: Mapping[str, Any]) -> bool:
        value = score.get(self.metric) if self.metric else None
        if value is None or self.at is None:
            return False
        return bool(value >= self.at if self.metric == "accuracy" else value <= self.at)
