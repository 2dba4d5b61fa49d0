"""What the pages say of jobs side by side, and of submissions that did not count."""

from datetime import UTC, datetime
from typing import Any

import pytest

from api.jobs.submissions import Spent
from api.pages.comparison import differing
from api.pages.explanations import advice, bubble_remedy, may_help_to_retry, pace, why
from api.schemas import SecondsPublic, SubmissionPublic
from computeshare.jobspec.spec import JobSpec
from computeshare.strategies.registry import DEFAULT, parse_strategy


def spec(**fields: Any) -> dict[str, Any]:
    return JobSpec.model_validate({"dataset": "digits", "model": "mlp", **fields}).model_dump(mode="json")


def test_only_what_differs_is_listed_by_its_dotted_field() -> None:
    found = differing([spec(name="a", rounds=3), spec(name="b", rounds=3, optimizer={"name": "Adam", "lr": 0.001})])
    assert found["optimizer.name"] == ["SGD", "Adam"]
    assert found["optimizer.lr"] == [0.05, 0.001]
    assert found["optimizer.momentum"] == [0.9, None]
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
        ({"outcome": "stale"}, "computed on version 12 when version 14 was current"),
        ({"outcome": "stale", "current_version": 12}, "that the broker has lost"),
        ({"outcome": "stale", "base_version": None}, "no longer current"),
        ({"outcome": "refused", "reason": "not finite"}, "Refused by the reducer: not finite"),
        ({"outcome": "duplicate"}, "the same message had already arrived"),
        ({"outcome": "lease_lost"}, "its lease had expired"),
        ({"outcome": "fenced"}, "a newer session"),
        ({"voided": True}, "restored from an earlier checkpoint"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_every_outcome_is_explained(values: dict[str, Any], told: str) -> None:
    assert told in why(submission(**values))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("Training diverged at version 12: the step produced NaN or infinity", "fork one of its checkpoints"),
        (
            "Training diverged at version 0: micro-batch 0 produced NaN or infinity 2 times (2 workers)",
            "Clone the job with a lower learning",
        ),
        ("OSError: [Errno 28] No space left on device: 'weights.safetensors'", "Free space"),
        ("OSError: [Errno 5] Input/output error", "Check the reducer's disk"),
        ("MemoryError: Unable to allocate 2 GiB", "more memory"),
        ("RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried 4 GB", "more memory"),
        ("the weights that this job was forked from are missing or damaged: fork again", "Fork again"),
        ("the optimizer's state is damaged (x): take an earlier checkpoint", "Fork an earlier checkpoint"),
        ("ValueError: version 3 is not known", "last checkpoint"),
        ("RuntimeError: the diskette did not diverge in memory", "last checkpoint"),
    ],
)
def test_advice_goes_by_what_failed(error: str, told: str) -> None:
    assert told in advice(error)


def test_only_a_job_that_can_have_a_checkpoint_is_to_be_forked() -> None:
    assert "fork" not in advice("Training diverged at version 0: the loss is not finite")


def test_no_checkpoint_is_spoken_of_where_there_is_none() -> None:
    for error in ("Training diverged at version 12: NaN", "No space left on device", "ValueError: version 3"):
        assert "checkpoint" in advice(error) and "fork" not in advice(error, saved=False)
        assert "last checkpoint" not in advice(error, saved=False) and "saved" not in advice(error, saved=False)


@pytest.mark.parametrize(
    ("error", "helps"),
    [
        ("Training diverged at version 1: NaN", False),
        ("the optimizer's state is damaged (x): take an earlier checkpoint", False),
        ("OSError: [Errno 28] No space left on device", True),
        ("ValueError: version 3 is not known", True),
    ],
)
def test_a_retry_is_offered_where_it_may_help(error: str, helps: bool) -> None:
    assert may_help_to_retry(error) is helps


def spent(worker: str = "w1", units: int = 10, **seconds: float) -> Spent:
    return Spent(
        worker, 10, units, SecondsPublic(**{"waiting": 0, "computing": 0, "encoding": 0, "uploading": 0, **seconds})
    )


@pytest.mark.parametrize(
    ("found", "units", "codec", "told"),
    [
        (
            [spent("a", waiting=32, computing=68), spent("b", waiting=32, computing=68)],
            4,
            "float16",
            "Workers wait 32 % of the time for each other: more micro-batches per round would help",
        ),
        (
            [spent(waiting=40, computing=60)],
            4,
            "float16",
            "The worker waits 40 % of the time for the next version: a larger micro_batch would help",
        ),
        (
            [spent(uploading=50, computing=50)],
            4,
            "float16",
            "The worker spends 50 % of the time sending updates: update codec int8 would help",
        ),
        ([spent(uploading=50, computing=50)], 4, "topk", "strategy local would help"),
        ([spent(encoding=30, computing=70)], 4, "topk", "30 % of the time encoding updates: update codec float16"),
        ([spent(waiting=5, computing=95)], 4, "float16", "computes 95 % of the time: more or faster workers"),
        ([], 4, "float16", ""),
    ],
)
def test_the_pace_is_explained_by_the_measured_shares(found: list[Spent], units: int, codec: str, told: str) -> None:
    said = pace(found, DEFAULT, units, codec)
    assert told in said and bool(said) == bool(told)


def test_what_a_job_has_already_is_not_said_to_help_it() -> None:
    local = parse_strategy({"kind": "local"})
    assert "more steps per update would help" in pace([spent(uploading=50, computing=50)], local, 4, "int8")
    assert "a larger micro_batch would help" in pace([spent(encoding=50, computing=50)], DEFAULT, 4, "float16")


def test_of_a_model_in_stages_the_bubble_is_explained_and_not_its_leaders_time() -> None:
    assert pace([spent(uploading=50, computing=50)], parse_strategy({"kind": "pipeline"}), 4, "float32") == ""
    assert bubble_remedy(0.1, 2, 8) == ""
    assert "in one piece: a larger accumulate would shorten it" in bubble_remedy(0.55, 2, 1)
    assert "in 4 pieces: a larger accumulate" in bubble_remedy(0.22, 2, 4)
    assert "With equal stages it would be 11 %: the link is slow" in bubble_remedy(0.5, 2, 8)
