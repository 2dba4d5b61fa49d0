"""Why a job is not advancing."""

from dataclasses import replace
from typing import Any

import pytest

from api.scheduler.eligibility import shown
from api.scheduler.reasons import STARTING_MS, Reason, Situation, reason

FACTS: dict[str, bool] = {"finished": False, "opened": True, "reducer": True, "working": True, "unplaced": False}
FINE = Situation(None, **FACTS, waited_ms=STARTING_MS + 1)


def test_a_job_that_advances_has_no_reason() -> None:
    assert reason(FINE) is None


@pytest.mark.parametrize(
    ("situation", "says"),
    [
        (replace(FINE, shortage=Reason("workers", "Needs 1 worker on queue mnist")), "Needs 1 worker on queue mnist"),
        (replace(FINE, reducer=False), "computeshare-reducer"),
        (replace(FINE, opened=False), "preparing the first weights"),
        (replace(FINE, working=False), "loading"),
        (replace(FINE, unplaced=True), "too little memory for all stages of the model: add workers"),
        (replace(FINE, finished=True, reducer=False, working=False), "saving and scoring"),
        (replace(FINE, finished=True, evaluator=False), "no evaluator is running to score the last version"),
        (replace(FINE, evaluator=False), "computeshare-evaluator"),
        (replace(FINE, finished=True, unscored="no memory"), "cannot be scored: no memory. It is tried again"),
        (replace(FINE, unscored="no memory"), "Training continues, but a version cannot be scored: no memory"),
        (
            replace(FINE, finished=True, evaluator=False, is_recipe=True),
            "no evaluator that runs recipes is running to score the last version: start computeshare-evaluator",
        ),
    ],
)
def test_what_is_missing_is_said(situation: Situation, says: str) -> None:
    found = reason(situation)
    assert found and says in found.text


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"no_room": "the broker is full"}, "memory"),
        ({"finished": True}, "finishing"),
        ({"finished": True, "evaluator": False}, "evaluator"),
        ({"finished": True, "unscored": "no memory"}, "scoring"),
        ({"reducer": False, "shortage": Reason("busy", "")}, "reducer"),
        ({"shortage": Reason("busy", ""), "opened": False}, "busy"),
        ({"trouble": "mac cannot start", "opened": False}, "worker"),
        ({"opened": False, "working": False}, "opening"),
        ({"working": False, "evaluator": False}, "loading"),
        ({"unplaced": True, "evaluator": False}, "stages"),
        ({"evaluator": False, "unscored": "no memory"}, "evaluator"),
        ({"unscored": "no memory"}, "scoring"),
    ],
    ids=str,
)
def test_programs_read_a_code_of_what_is_told_first(changes: dict[str, Any], code: str) -> None:
    found = reason(replace(FINE, **changes))
    assert found and found.code == code


def test_reducers_are_given_a_moment_before_they_are_missed() -> None:
    young = replace(FINE, reducer=False, opened=False, waited_ms=STARTING_MS - 1)
    assert reason(young) == Reason("opening", "A reducer is preparing the first weights")


def test_what_the_broker_refuses_comes_first() -> None:
    told = "The broker refuses to store data: OOM command not allowed"
    assert reason(replace(FINE, finished=True), "OOM command not allowed") == Reason("broker", told)


def test_workers_with_the_same_trouble_share_a_text() -> None:
    cause = "recipe.py, line 3: the import failed: No module named 'peft'"
    texts = [f"mac-{number} cannot start: {cause}" for number in range(5)]
    assert shown(texts) == [f"mac-0, mac-1, mac-2 and 2 more cannot start: {cause}"]
    assert shown([*texts[:1], "pi runs no recipes: start it with --recipes", *texts[1:2]]) == [
        f"mac-0, mac-1 cannot start: {cause}",
        "pi runs no recipes: start it with --recipes",
    ]
    assert shown(f"mac-{number} cannot start: {number}" for number in range(5))[3:] == ["2 more cannot take part"]
