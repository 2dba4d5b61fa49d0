"""When the goals of recovery count as met."""

from pathlib import Path

import pytest

from bench import recovery
from bench.support.results import append


def test_every_trial_has_to_meet_the_goal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "RELIABILITY", tmp_path / "results.jsonl")
    goal_s = recovery.CASES["reducer"].goal_s

    def note(seconds: float) -> None:
        entry = {"bench": "recovery", "case": "reducer", "seconds": seconds, "sources": "now"}
        append(recovery.RELIABILITY, entry)

    for _ in range(50):
        note(goal_s)
    assert recovery.table("now")[1]
    note(goal_s + 0.1)  # within the 95th percentile
    assert not recovery.table("now")[1]
