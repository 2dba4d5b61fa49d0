"""How long a worker took part in a job."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from api.database import Database
from api.fleet.contributions import Contributions, present
from api.schemas import ContributionList


def event(kind: str, at_ms: int, worker: str = "w1", job_id: str = "j") -> Any:
    return SimpleNamespace(job_id=job_id, type=kind, at_ms=at_ms, data={"worker": worker})


def test_every_stay_counts_from_joining_to_leaving() -> None:
    events = [event("joined", 1000), event("left", 3000), event("joined", 10_000), event("banned", 10_500)]
    assert present(events) == {("j", "w1"): (2500, None)}


def test_a_worker_that_has_not_left_has_a_stay_without_an_end() -> None:
    events = [event("joined", 1000), event("joined", 4000), event("joined", 5, "w2"), event("left", 7, job_id="k")]
    found = present(events)
    assert found[("j", "w1")] == (3000, 4000) and found[("j", "w2")] == (0, 5) and found[("k", "w1")] == (0, None)


def test_a_change_during_a_sum_is_in_the_next_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    contributions, sums = Contributions(Database(f"sqlite:///{tmp_path}/empty.db")), 0

    def summed() -> ContributionList:
        nonlocal sums
        sums += 1
        if sums == 1:
            contributions.forget()
        return ContributionList(items=[], people=[])

    monkeypatch.setattr(contributions, "_summed", summed)
    for _ in range(3):
        contributions.list()
    assert sums == 2
