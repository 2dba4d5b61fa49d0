"""The words of the pages."""

from datetime import UTC, datetime
from typing import Any

import pytest

from api import text_format
from api.schemas import EpochPublic, EventPublic


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (59.9, "59 s"),
        (60, "1 min"),
        (192, "3 min 12 s"),
        (3600, "1 h"),
        (7500, "2 h 5 min"),
        (1e5, "1 d 3 h"),
    ],
)
def test_durations_have_two_units_at_most(seconds: float, words: str) -> None:
    assert text_format.duration(seconds) == words


@pytest.mark.parametrize(("seconds", "words"), [(-1, "0 s ago"), (3599, "59 min ago"), (9e5, "10 d ago")])
def test_ago_has_one_unit(seconds: float, words: str) -> None:
    assert text_format.ago(seconds) == words


@pytest.mark.parametrize(
    ("number", "words"), [(0, "0 B"), (999, "999 B"), (87_360, "87.4 kB"), (246_824, "247 kB"), (45 * 10**6, "45.0 MB")]
)
def test_sizes_are_decimal(number: int, words: str) -> None:
    assert text_format.size(number) == words


def test_a_job_is_done_to_100_percent_only_at_the_end() -> None:
    assert [text_format.done(v, 1000) for v in (0, 999, 1000)] == ["0 %", "99 %", "100 %"]


def epoch(**values: int) -> EpochPublic:
    about = {"epoch": 0, "samples": 60_000, "counted": 60_000, "missing": 0, "reassigned": 214, "duplicates_refused": 0}
    return EpochPublic(**about | values)


def test_the_ledger_line_says_so_only_if_each_sample_counted_once() -> None:
    assert text_format.ledger_line(epoch()) == "60,000 of 60,000 samples counted once, 214 reassigned"
    lost = "59,968 of 60,000 samples counted once, 32 missing, 214 reassigned"
    assert text_format.ledger_line(epoch(counted=59_968, missing=32)) == lost
    twice = "60,000 of 60,000 samples counted, 32 more than once, 214 reassigned"
    assert text_format.ledger_line(epoch(counted=60_032)) == twice


NAMES = {"w1": "mac-studio"}


@pytest.mark.parametrize(
    ("kind", "data", "words"),
    [
        ("joined", {"worker": "w1", "name": "", "device": "cpu"}, "w1 joined with cpu"),
        ("left", {"worker": "w1", "reason": "left"}, "mac-studio left"),
        ("left", {"worker": "w9", "reason": "fenced"}, "w9 left (fenced)"),
        (
            "banned",
            {"worker": "w1", "strikes": 5, "reason": "checksum"},
            "mac-studio was banned after 5 refused updates: checksum",
        ),
        *(
            (
                "suspected",
                {"version": 3, "micro_batch": 1200, "worker": "w1", "outcome": outcome},
                f"The update of micro-batch 1,200 from mac-studio {then}",
            )
            for outcome, then in (
                ("asked", "is unlike the others: another machine computes it again"),
                ("confirmed", "was right: another machine computed the same"),
                (
                    "alone",
                    "is unlike the others, and no other machine of its kind is there to compute it again: it counts",
                ),
                ("late", "is unlike the others, and no other machine has computed it again in time: it counts"),
            )
        ),
        (
            "closed",
            {"version": 1199, "received": 3, "total": 4},
            "The round of version 1,200 closed at its deadline with 3 of 4 micro-batches",
        ),
        (
            "reassigned",
            {"version": 3, "micro_batch": 1200, "from": "w1", "to": "w9", "after_ms": 3100},
            "Micro-batch 1,200 went from mac-studio to w9 after 3.1 s",
        ),
        ("created", {"name": "x"}, "Created"),
        ("created", {"name": "x", "by": "the owner"}, "Created by the owner"),
        (
            "created",
            {"name": "x", "forked_from": {"job_id": "ab12cd34", "version": 1200, "optimizer": "kept"}},
            "Forked from version 1,200 of job ab12cd34, with its optimizer's state",
        ),
        (
            "opened",
            {"restored": True, "version": 300, "parameters": 1},
            "Continued from version 300, the last checkpoint",
        ),
        ("version", {"version": 1200, "loss": 0.03126}, "Version 1,200 committed, loss 0.03126"),
        (
            "version",
            {"version": 7, "loss": 0.5, "doubled": 1},
            "Version 7 committed, loss 0.5; 1 micro-batch given to a second worker",
        ),
        (
            "version",
            {"version": 7, "loss": 0.5, "doubled": 2},
            "Version 7 committed, loss 0.5; 2 micro-batches given to a second worker",
        ),
        ("scored", {"version": 300, "accuracy": 0.9731, "loss": None}, "Version 300 scored 97.31 %, loss –"),
        (
            "unscored",
            {"version": 3, "error": "recipe.py, line 4: metrics() failed"},
            "Version 3 could not be scored, and is tried again every minute: recipe.py, line 4: metrics() failed",
        ),
        (
            "scored",
            {"version": 3, "accuracy": 0.5, "loss": 0.7, "own_metrics": {"f1": 0.25, "recall": None}},
            "Version 3 scored 50.00 %, loss 0.7, f1 0.25, recall –",
        ),
        ("cancelled", {"reason": "Cancelled by a user", "error": None}, "Cancelled by a user"),
        ("paused", {"by": "a user"}, "Paused by a user"),
        ("resumed", {"by": "a user"}, "Resumed by a user"),
        ("retried", {"by": "a user"}, "Retried by a user, from the last checkpoint"),
        (
            "edited",
            {"by": "a user", "field": "requires", "before": None, "after": {"memory": "8GB", "labels": {"a": "b"}}},
            'Required of a worker set to "memory=8GB, a=b" by a user',
        ),
        (
            "edited",
            {"by": "a user", "field": "prefers", "before": {"device": "cuda"}, "after": {"labels": {}}},
            'Preferred in a worker "device=cuda" removed by a user',
        ),
        ("completed", {"status": "completed"}, "Completed"),
        ("something_new", {}, "Something new"),
        ("reassigned", {"of": "another version"}, "Reassigned"),
    ],
)
def test_events_are_told_in_sentences(kind: str, data: dict[str, Any], words: str) -> None:
    event = EventPublic(id=1, type=kind, at=datetime.now(UTC), data=data)
    assert text_format.told(event, NAMES) == words


def test_what_replicas_are_given_is_called_work_units() -> None:
    unit = text_format.unit_of({"strategy": {"kind": "local"}})
    moved = {"version": 3, "micro_batch": 12, "from": "w1", "to": "w9", "after_ms": 3100}
    event = EventPublic(id=1, type="reassigned", at=datetime.now(UTC), data=moved)
    assert text_format.told(event, NAMES, unit) == "Work unit 12 went from mac-studio to w9 after 3.1 s"
