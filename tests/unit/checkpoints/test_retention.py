"""Which checkpoints a job keeps as newer ones come."""

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from computeshare.checkpoints.retention import Retention
from computeshare.checkpoints.store import Artifacts
from computeshare.jobspec.spec import JobSpec
from computeshare.types import Token
from tests.support.checkpoints import write_checkpoint

TENSORS = {"w": np.zeros(1, np.float32)}


class Written:
    """A job's checkpoints, each followed by a look at which of them stay."""

    def __init__(self, root: Path, *, scored: bool = False, **spec: Any) -> None:
        values = {"dataset": "digits", "model": "mlp", "rounds": 1000, "evaluate_every": 0, **spec}
        self.spec, self.scored = JobSpec.model_validate(values), scored
        self.artifacts = Artifacts(root, "job")
        self.retention = Retention(self.artifacts, self.spec)

    def write(self, version: int, incarnation: int = 1) -> Token:
        token = Token(incarnation, version, f"{version:016x}")
        write_checkpoint(self.artifacts, token, TENSORS, b"state", "ab" * 32, 0, 0)
        return token

    def score(self, version: int, accuracy: float) -> None:
        self.artifacts.save_score(Token(1, version, f"{version:016x}"), {"accuracy": accuracy})

    def run(self, versions: Iterable[int]) -> list[int]:
        """Those that are there after all of these have come."""
        for version in versions:
            token = self.write(version)
            if self.scored:
                self.score(version, 1 - abs(version - 200) / 1000)
            self.retention.prune(token)
        return self.left()

    def left(self) -> list[int]:
        return [token.version for token in self.artifacts.on_disk()]


def test_the_newest_five_stay_and_the_last_version_among_them(tmp_path: Path) -> None:
    job = Written(tmp_path)
    assert job.run(range(10, 101, 10)) == [60, 70, 80, 90, 100]
    assert job.run([995, 1000]) == [80, 90, 100, 995, 1000]


def test_the_best_stays_however_old_it_is(tmp_path: Path) -> None:
    assert Written(tmp_path, scored=True).run(range(100, 901, 100)) == [200, 500, 600, 700, 800, 900]


@pytest.mark.parametrize(("best", "kept"), [(0, []), (2, [100, 200]), (3, [100, 200, 300])])
def test_as_many_of_the_best_stay_as_the_job_says(tmp_path: Path, best: int, kept: list[int]) -> None:
    job = Written(tmp_path, scored=True, keep={"best": best, "last": 2})
    assert job.run(range(100, 901, 100)) == [*kept, 800, 900]


def test_one_every_so_many_versions_stays_for_good(tmp_path: Path) -> None:
    job = Written(tmp_path, keep={"last": 2, "every": 30})
    assert job.run(range(10, 101, 10)) == [30, 60, 90, 100]


def test_two_stay_while_the_job_runs_and_the_last_one_after_it(tmp_path: Path) -> None:
    job = Written(tmp_path, keep={"last": 0, "best": 0})
    assert job.run(range(10, 51, 10)) == [40, 50]
    assert job.run([1000]) == [1000]


def test_what_the_job_was_forked_from_stays(tmp_path: Path) -> None:
    job = Written(tmp_path, keep={"last": 1})
    job.write(0, incarnation=0)
    assert job.run(range(10, 101, 10)) == [0, 90, 100]


def test_one_that_is_to_be_scored_waits_for_its_score(tmp_path: Path) -> None:
    job = Written(tmp_path, evaluate_every=30, keep={"last": 1})
    assert job.run(range(10, 101, 10)) == [30, 60, 90, 100]
    job.score(30, 0.5)
    job.score(60, 0.7)
    assert job.run([110, 120, 130]) == [60, 90, 120, 130]


def test_whoever_takes_over_removes_what_is_left_of_before(tmp_path: Path) -> None:
    job = Written(tmp_path)
    saved = [job.write(version) for version in range(10, 101, 10)]
    job.artifacts.next_incarnation(saved[-2])  # so that version 100 belongs to no branch
    job.retention.prune(job.write(110, incarnation=2))
    assert job.left() == [60, 70, 80, 90, 110]


def test_a_look_costs_the_same_however_many_checkpoints_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Written(tmp_path, scored=True, keep={"last": 3, "every": 1})
    job.run(range(1, 6))
    looked: list[str] = []
    for name in ("on_disk", "branch", "score", "remove"):
        do = getattr(Artifacts, name)
        monkeypatch.setattr(Artifacts, name, lambda *args, do=do, name=name: (looked.append(name), do(*args))[1])

    def cost(version: int) -> list[str]:
        looked.clear()
        job.retention.prune(job.write(version))
        return sorted(looked)

    early = cost(6)
    job.run(range(7, 200))
    assert cost(200) == early


def test_what_killed_writers_left_goes_after_an_hour(tmp_path: Path) -> None:
    job = Written(tmp_path)
    old, young = (tmp_path / "job" / ".unfinished" / f"1.2.0123456789abcdef.{name}" for name in ("00", "11"))
    for folder in (old, young):
        folder.mkdir(parents=True)
        (folder / "weights.safetensors").write_bytes(b"half")
    os.utime(old, (time.time() - 7200,) * 2)
    job.run([1])
    assert not old.exists() and young.exists()


def test_the_best_of_a_language_model_has_the_lowest_loss(tmp_path: Path) -> None:
    written = Written(tmp_path, dataset="tinyshakespeare", model="gpt", evaluate_every=1, keep={"last": 2, "best": 1})
    for version, loss in enumerate([2.0, 1.5, 1.7, 1.6, 1.8], 1):
        token = written.write(version)
        written.artifacts.save_score(token, {"loss": loss, "samples": 3})
        written.retention.prune(token)
    assert written.left() == [2, 4, 5]


def test_early_stopping_finds_the_same_version_in_whatever_order_scores_come(tmp_path: Path) -> None:
    job = Written(tmp_path, evaluate_every=10, keep={"last": 2}, stop={"metric": "accuracy", "at": 0.8})
    job.run(range(10, 71, 10))
    for version, accuracy in [(70, 0.95), (60, 0.93), (50, 0.85), (40, 0.81), (30, 0.7), (20, 0.6)]:
        job.score(version, accuracy)
        job.run([70])
        assert job.left() == [10, 20, 30, 40, 50, 60, 70]
    job.score(10, 0.5)
    assert job.run([70]) == [30, 40, 50, 60, 70]  # version 40 was the first that reached 0.8; 30 was the best before it


@pytest.mark.parametrize("stop", [None, {"patience": 50}])
def test_a_damaged_checkpoint_waits_for_no_score(tmp_path: Path, stop: dict[str, int] | None) -> None:
    job = Written(tmp_path, evaluate_every=10, keep={"last": 2}, stop=stop)
    for version in range(10, 510, 10):
        token = job.write(version)
        if version == 20:
            job.artifacts.mark_damaged(token)
        else:
            job.score(version, version / 1000)
        job.retention.prune(token)
    assert job.left() == [480, 490, 500]  # the two newest, and the best of those before


def test_a_job_that_has_not_stopped_yet_keeps_the_best_to_compare_with(tmp_path: Path) -> None:
    job = Written(tmp_path, evaluate_every=10, keep={"last": 2}, stop={"patience": 2})
    for version, accuracy in enumerate([0.5, 0.7, 0.6, 0.8, 0.7, 0.75, 0.9], 1):
        job.write(10 * version)
        job.score(10 * version, accuracy)
    assert job.run([70]) == [40, 60, 70]
    assert job.run([80]) == [40, 60, 70, 80]  # the job stops with 60, the second in a row that was no better than 40
