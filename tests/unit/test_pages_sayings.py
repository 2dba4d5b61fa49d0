"""What the pages say of jobs side by side, and of submissions that did not count."""

from datetime import UTC, datetime
from typing import Any

import pytest

from api.schemas import SecondsPublic, SubmissionPublic
from api.services.comparing import differing
from api.services.explaining import advice, why
from computeshare.spec import JobSpec


def spec(**fields: Any) -> dict[str, Any]:
    return JobSpec.model_validate({"dataset": "digits", "model": "mlp", **fields}).model_dump(mode="json")


def test_only_what_differs_is_listed_by_its_dotted_field() -> None:
    found = differing([spec(name="a", rounds=3), spec(name="b", rounds=3, optimizer={"name": "Adam", "lr": 0.001})])
    assert found["optimizer.name"] == ["SGD", "Adam"]
    assert found["optimizer.lr"] == ["0.05", "0.001"]
    assert found["optimizer.momentum"] == ["0.9", "–"]
    assert not found.keys() & {"name", "rounds", "dataset"}


def test_equal_specifications_differ_in_nothing() -> None:
    assert differing([spec(), spec(name="other")]) == {}


def submission(**values: Any) -> SubmissionPublic:
    usual: dict[str, Any] = {
        "id": 1,
        "at": datetime.now(UTC),
        "worker": "w1",
        "nonce": "n",
        "outcome": "accepted",
        "reason": None,
        "base_version": 12,
        "current_version": 14,
        "base": "1.12.aa",
        "current": "1.14.bb",
        "micro_batches": [1],
        "samples": 32,
        "bytes_up": 1,
        "bytes_down": 1,
        "seconds": SecondsPublic(waiting=0, computing=0, encoding=0, uploading=0),
        "voided": False,
    }
    return SubmissionPublic(**usual | values)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({}, "Counted"),
        ({"outcome": "stale"}, "computed on version 12, and version 14 had come"),
        ({"outcome": "stale", "current_version": 12}, "that the broker has lost"),
        ({"outcome": "stale", "base_version": None}, "no longer the current one"),
        ({"outcome": "refused", "reason": "not finite"}, "Refused by the reducer: not finite"),
        ({"outcome": "duplicate"}, "the same message had come before"),
        ({"outcome": "lease_lost"}, "its lease had run out"),
        ({"outcome": "fenced"}, "a newer session"),
        ({"voided": True}, "went back to a checkpoint"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_every_outcome_is_explained(values: dict[str, Any], told: str) -> None:
    assert told in why(submission(**values))


def test_advice_goes_by_what_failed() -> None:
    assert "learning rate" in advice("diverged at version 12: the loss is not finite")
    assert "Make room" in advice("No space left on device")
    assert "last checkpoint" in advice("something else")
