"""Differential privacy: what epsilon comes to, and which jobs may have it."""

import math
from typing import Any

import pytest
from pydantic import ValidationError

from computeshare.jobspec.privacy import Privacy
from computeshare.jobspec.spec import JobSpec

DIGITS = {"dataset": "digits", "model": "mlp", "privacy": {"clip": 1.0, "noise": 4.0}}


@pytest.mark.parametrize(
    ("noise", "epochs", "delta", "expected"),
    [(2.0, 1, 1e-5, 4.37718), (4.0, 1, 1e-5, 1.99309), (4.0, 10, 1e-5, 7.51128), (20.0, 100, 1e-6, 4.88655)],
)
def test_epsilon_is_that_of_an_accountant(noise: float, epochs: int, delta: float, expected: float) -> None:
    """The expected values are those of dp-accounting 0.6, by privacy loss distributions."""
    assert Privacy(clip=1.0, noise=noise, delta=delta).epsilon(epochs) == pytest.approx(expected, rel=1e-5)


def test_epsilon_grows_with_epochs_and_has_an_end() -> None:
    weak, strong = Privacy(clip=1.0, noise=0.01), Privacy(clip=1.0, noise=100.0)
    assert strong.epsilon(0) == 0.0
    assert 0 < strong.epsilon(1) < strong.epsilon(2) < strong.epsilon(1000)
    assert weak.epsilon(1) == math.inf


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"privacy": {"clip": 1.0}}, "privacy needs clip and noise"),
        ({"strategy": {"kind": "signsgd"}}, "choose sync or async"),
        ({"strategy": {"kind": "local", "replicas": 2, "inner_steps": 2}}, "choose sync or async"),
        ({"model": "resnet20", "dataset": "cifar10"}, "choose a model without it"),
    ],
)
def test_what_would_not_be_private_is_refused(change: dict[str, Any], message: str) -> None:
    JobSpec.model_validate(DIGITS)
    with pytest.raises(ValidationError, match=message):
        JobSpec.model_validate(DIGITS | change)
