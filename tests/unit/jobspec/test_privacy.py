"""Which jobs may have differential privacy."""

from typing import Any

import pytest
from pydantic import ValidationError

from computeshare.jobspec.spec import JobSpec

DIGITS = {"dataset": "digits", "model": "mlp", "privacy": {"clip": 1.0, "noise": 4.0}}


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
