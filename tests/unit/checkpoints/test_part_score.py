"""What is told of a score: that by which versions are compared, and a recipe's own metrics beside it."""

import pytest

from computeshare.checkpoints.part_score import PartScore, document_of
from computeshare.jobspec.tasks.facts import Metric, goodness


@pytest.mark.parametrize(
    ("metrics", "metric", "told", "value"),
    [
        ({"accuracy": 0.5}, "accuracy", {"accuracy": 0.5}, 0.5),
        ({}, "loss", {}, -2.0),
        ({"accuracy": 0.5, "f1": 0.25}, "accuracy", {"accuracy": 0.5, "own_metrics": {"f1": 0.25}}, 0.5),
        ({"accuracy": 0.5, "f1": 0.25}, "loss", {"own_metrics": {"accuracy": 0.5, "f1": 0.25}}, -2.0),
        (
            {"loss": 9.0, "token": 1.0, "test": 2.0},
            "loss",
            {"own_metrics": {"loss": 9.0, "token": 1.0, "test": 2.0}},
            -2,
        ),
    ],
)
def test_versions_are_compared_as_the_job_says_whatever_metrics_there_are(
    metrics: dict[str, float], metric: Metric, told: dict[str, object], value: float
) -> None:
    found = document_of(PartScore(loss=2.0, metrics=metrics, samples=10), metric)
    assert found == {"loss": 2.0, "samples": 10, **told}
    assert goodness(found) == value
