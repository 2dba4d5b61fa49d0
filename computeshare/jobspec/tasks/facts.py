"""Sizes of a job's task, and scores as numbers to compare. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Metric = Literal["accuracy", "loss"]


@dataclass(frozen=True, slots=True)
class TaskFacts:
    """The number of samples in each split, the largest number of parameters, and the metric by which versions are
    compared: `accuracy` (higher is better) or `loss` (lower is better).
    """

    train: int
    test: int
    parameters: int
    metric: Metric


def goodness(score: Mapping[str, Any]) -> float:
    """A number that is higher for better scores: the accuracy, or minus the loss if there is no accuracy."""
    accuracy, loss = score.get("accuracy"), score.get("loss")
    value = accuracy if accuracy is not None else -loss if loss is not None else -math.inf
    return float(value) if math.isfinite(value) else -math.inf


def perplexity(loss: float | None) -> float | None:
    """e to the power of a loss in nats per token; None without a loss, or where no float holds it."""
    return math.exp(loss) if loss is not None and loss < 700 else None
