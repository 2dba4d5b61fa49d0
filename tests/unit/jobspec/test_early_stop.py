"""Early stopping: which version a job is complete with, and why."""

from typing import Any

import pytest
from pydantic import ValidationError

from computeshare.jobspec.early_stop import Stop
from computeshare.jobspec.spec import JobSpec


def scores(*accuracies: float, every: int = 10) -> dict[int, dict[str, Any]]:
    return {every * n: {"accuracy": one, "loss": 1 - one} for n, one in enumerate(accuracies, 1)}


@pytest.mark.parametrize(
    ("stop", "found", "version"),
    [
        ({"metric": "accuracy", "at": 0.9}, scores(0.5, 0.9, 0.95), 20),
        ({"metric": "accuracy", "at": 0.96}, scores(0.5, 0.9, 0.95), None),
        ({"metric": "loss", "at": 0.25}, scores(0.5, 0.8, 0.7), 20),
        ({"patience": 2}, scores(0.5, 0.8, 0.7), None),
        ({"patience": 2}, scores(0.5, 0.8, 0.7, 0.8), 40),
        ({"patience": 2}, scores(0.5, 0.8, 0.7, 0.81, 0.6), None),
        ({"patience": 1, "metric": "accuracy", "at": 0.8}, scores(0.5, 0.8, 0.7), 20),
        ({"patience": 3}, {20: {"accuracy": 0.8, "loss": 1.0}, 50: {"accuracy": 0.7, "loss": 1.0}}, 50),
        ({"patience": 1}, {10: {"loss": 2.0}, 20: {"loss": 1.0}, 30: {"loss": 1.5}}, 30),
        ({"patience": 1}, {}, None),
    ],
)
def test_the_version_to_stop_at(stop: dict[str, Any], found: dict[int, dict[str, Any]], version: int | None) -> None:
    decision = Stop.model_validate(stop).decide(found, every=10)
    assert (decision and decision[0]) == version
    assert decision is None or str(version) in decision[1]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"stop": {}}, "needs metric and at, or patience"),
        ({"stop": {"metric": "accuracy"}}, "metric and at together"),
        ({"stop": {"at": 0.9}}, "metric and at together"),
        ({"stop": {"metric": "f1", "at": 0.9}}, "'accuracy' or 'loss'"),
        ({"stop": {"metric": "accuracy", "at": 98}}, "a fraction above 0, at most 1, not 98"),
        ({"stop": {"metric": "accuracy", "at": 0}}, "a fraction above 0, at most 1, not 0"),
        ({"stop": {"patience": 0}}, "greater than or equal to 1"),
        ({"stop": {"patience": 5}, "evaluate_every": 0}, "set evaluate_every above 0"),
        ({"stop": {"patience": 5}, "keep": {"best": 0}}, "set keep.best above 0"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        JobSpec.model_validate({"dataset": "digits", "model": "mlp", **fields})
