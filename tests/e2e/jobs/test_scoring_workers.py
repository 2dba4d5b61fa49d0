"""Without an evaluator workers train and score, and a job ends as it does with one."""

from pathlib import Path

import pytest

from computeshare.runtime.failpoints import VARIABLE
from tests.support.control_plane import DIGITS_MLP, control_plane

pytestmark = pytest.mark.e2e
STOP = {"stop": {"metric": "accuracy", "at": 0.8}, "validation": 0.1, "checkpoint_every": 0, "evaluate_every": 5}


def test_workers_score_what_they_trained_though_a_scorer_is_killed(tmp_path: Path) -> None:
    points = tmp_path / "points"
    points.mkdir()
    (points / "before_score").write_text("kill")
    flags, variables = ("--workers", "2", "--queue", "e2e"), {"COMPUTESHARE_EVALUATOR": "false", VARIABLE: str(points)}
    with control_plane(tmp_path / "home", *flags, **variables) as plane:
        both = plane.finish(plane.create(**DIGITS_MLP, **STOP, rounds=40, workers={"max": 2}))
        assert not (points / "before_score").exists(), "no scorer was killed"
        assert plane.pids("evaluator") == []
        assert "Stopped early: accuracy" in both["reason"] and both["version"] % 5 == 0 and both["version"] < 40
        assert both["accuracy"] >= 0.8 and both["tested"]["samples"] == 360
        alone = plane.finish(plane.create(**DIGITS_MLP, **STOP, rounds=20_000, workers={"max": 1}))
        assert alone["rounds_total"] < 20_000, "the other worker scored while one trained"
        assert (alone["version"], alone["weights_sha256"]) == (both["version"], both["weights_sha256"])
        (points / "before_score").write_text("sleep:300")
        slow = plane.create(**DIGITS_MLP, rounds=5, evaluate_every=0)
        plane.until("a scorer", lambda: not (points / "before_score").exists())
        trained = plane.finish(plane.create(**DIGITS_MLP, rounds=5, evaluate_every=0, workers={"min": 2, "max": 2}))
        assert trained["accuracy"] is not None, "a scorer left in mid-score to train, and then scored"
        assert plane.finish(slow)["accuracy"] is not None
