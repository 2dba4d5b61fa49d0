"""From events to rows, without a database."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.projection.events.handlers import apply
from api.projection.events.job_projection import JobProjection, JobState
from api.projection.events.parser import StreamEvent, read_event
from api.projection.rates import JobRates
from api.tables import Job
from computeshare.jobspec.sampling_plan import Plan

PLAN = Plan(seed=0, samples=100, micro_batch=10, micro_batches_per_round=4)


def state() -> JobState:
    job = Job(id="abcdefgh", name="", queue="q", status="running", spec={}, rounds_total=6, created_ms=0, updated_ms=0)
    return JobState("abcdefgh", PLAN, job.model_dump())


def projected(*events: tuple[str, dict[str, Any]]) -> JobProjection:
    projection = JobProjection(state(), JobRates())
    for number, (kind, data) in enumerate(events):
        apply(projection, StreamEvent(f"{number}-0", kind, 1000 * number, data))
    return projection


def version(number: int, incarnation: int = 1) -> tuple[str, dict[str, Any]]:
    about = {"token": f"{incarnation}.{number}.{number:016x}", "version": number, "epoch": 0, "loss": 1.5}
    return "version", {**about, "sha256": "aa", "counted": [[0, "w1", 10], [1, "w2", 10]], "seconds": {"step": 0.1}}


def test_version_of_an_older_incarnation_changes_no_column() -> None:
    projection = projected(version(1, incarnation=2), version(2, incarnation=1))
    assert (projection.state["version"], projection.state["incarnation"]) == (1, 2)


def test_samples_per_s_is_that_of_the_steps_between_versions() -> None:
    projection = projected(version(1), version(2), version(3))
    assert [row["samples_per_s"] for row in projection.changes.versions] == [0.0, 20.0, 20.0]


def test_loss_that_is_not_finite_is_kept_as_none() -> None:
    kind, data = version(1)
    assert projected((kind, {**data, "loss": float("nan")})).state["loss"] is None


def test_best_version_is_the_earliest_with_the_highest_accuracy() -> None:
    def scored(number: int, accuracy: float) -> tuple[str, dict[str, Any]]:
        return "scored", {"token": f"1.{number}.{number:016x}", "loss": 1.0, "accuracy": accuracy, "samples": 5}

    projection = projected(scored(1, 0.5), scored(3, 0.9), scored(2, 0.9), scored(4, 0.1))
    columns = projection.state
    assert (columns["best_version"], columns["best_accuracy"]) == (2, 0.9)
    assert (columns["scored_version"], columns["accuracy"]) == (4, 0.1)


def test_best_version_of_a_language_model_is_the_earliest_with_the_lowest_loss() -> None:
    def scored(number: int, loss: float) -> tuple[str, dict[str, Any]]:
        return "scored", {"token": f"1.{number}.{number:016x}", "loss": loss, "samples": 5}

    columns = projected(scored(1, float("nan")), scored(3, 1.5), scored(2, 1.5), scored(4, 1.9)).state
    assert (columns["best_version"], columns["best_loss"], columns["best_accuracy"]) == (2, 1.5, None)
    assert (columns["scored_version"], columns["test_loss"], columns["accuracy"]) == (4, 1.9, None)


def test_leases_freed_by_a_worker_that_left_count_as_reassigned() -> None:
    left = {"worker": "w1", "session": "s", "reason": "not heard of any more", "freed": [9, 10]}
    projection = projected(("left", left))
    assert projection.state["reassigned"] == 2
    assert {epoch: row["reassigned"] for epoch, row in projection.changes.epochs.items()} == {0: 10, 1: 10}


def test_what_is_reassigned_is_counted_in_samples_of_whole_units() -> None:
    plan = Plan(seed=0, samples=100, micro_batch=10, micro_batches_per_round=8, inner_steps=4)  # 40, 40 and 20
    projection = JobProjection(replace(state(), plan=plan), JobRates())
    left = {"worker": "w1", "session": "s", "reason": "left", "freed": [2, 3]}
    apply(projection, StreamEvent("0-0", "left", 0, left))
    assert {epoch: row["reassigned"] for epoch, row in projection.changes.epochs.items()} == {0: 20, 1: 40}


def test_event_of_an_unknown_type_is_passed_over() -> None:
    projection = projected(("surprise", {"x": 1}))
    assert not projection.state.changed and not projection.changes.events


@given(fields=st.dictionaries(st.sampled_from([b"type", b"at", b"data"]), st.binary()))
def test_entry_is_read_or_refused(fields: dict[bytes, bytes]) -> None:
    try:
        entry = read_event(b"1-0", fields)
    except (KeyError, TypeError, ValueError, OverflowError):
        return
    assert isinstance(entry.data, dict)


def joined(kind: object) -> tuple[str, dict[str, Any]]:
    return "joined", {"worker": "w1", "session": "s", "seat": "x", "name": "n", "device": "cpu", "kind": kind}


@pytest.mark.parametrize(("up", "resets"), [("topk", 2), ("int8", 0)], ids=["with error feedback", "without"])
def test_error_feedback_that_begins_at_zero_in_mid_job_is_counted(up: str, resets: int) -> None:
    projection = JobProjection(state(), JobRates())
    projection.state["spec"] = json.dumps({"codec": {"up": up, "down": "float32"}})
    for number, (kind, data) in enumerate([joined({}), version(1), joined({}), version(2), joined({})]):
        apply(projection, StreamEvent(f"{number}-0", kind, 1000 * number, data))
    assert projection.state["residual_resets"] == resets


def test_audits_are_counted() -> None:
    outcomes = ("confirmed", "mismatched", "confirmed", "undecided", "skipped")
    projection = projected(*(("audited", {"outcome": outcome}) for outcome in outcomes))
    assert (projection.state["audited"], projection.state["confirmed"]) == (4, 2)
    with pytest.raises(ValueError, match="not an outcome"):
        projected(("audited", {"outcome": ["confirmed"]}))


@pytest.mark.parametrize("outcome", ["asked", "confirmed", "alone", "late"])
def test_a_suspected_update_is_in_the_log(outcome: str) -> None:
    about = {"version": 3, "micro_batch": 5, "worker": "w1", "outcome": outcome}
    [event] = projected(("suspected", about | {"more": 1})).changes.events
    assert event["data"] == about
    with pytest.raises(ValueError, match="not an outcome"):
        projected(("suspected", about | {"outcome": "lost"}))


def test_the_kind_of_machine_of_a_worker_and_of_a_reducer_is_in_the_log() -> None:
    kind = {"device": "cpu", "threads": 2}
    opened = {"token": f"1.0.{0:016x}", "sha256": "aa", "parameters": 1, "restored": False, "kind": kind}
    projection = projected(joined(kind), ("opened", opened))
    assert projection.changes.presence[0]["kind"] == kind
    assert [event["data"]["kind"] for event in projection.changes.events] == [kind, kind]
    assert projection.state["reducer_kind"] == '{"device":"cpu","threads":2}'


@pytest.mark.parametrize("kind", [[], "cpu", {"threads": 2.5}, {"threads": True}, {"threads": -1}, {"device": {}}])
def test_a_kind_that_is_none_is_refused(kind: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        projected(joined(kind))


def test_a_kind_is_bounded() -> None:
    huge = {"x" * 500 + str(n): "y" * 10_000 for n in range(500)}
    (row,) = projected(joined(huge)).changes.presence
    assert len(row["kind"]) <= 12 and all(len(k) <= 100 and len(v) <= 100 for k, v in row["kind"].items())
