"""How long a worker took part in a job."""

from types import SimpleNamespace
from typing import Any

from api.fleet.contributions import present


def event(kind: str, at_ms: int, worker: str = "w1", job_id: str = "j") -> Any:
    return SimpleNamespace(job_id=job_id, type=kind, at_ms=at_ms, data={"worker": worker})


def test_every_stay_counts_from_joining_to_leaving() -> None:
    events = [event("joined", 1000), event("left", 3000), event("joined", 10_000), event("banned", 10_500)]
    assert present(events) == {("j", "w1"): (2500, None)}


def test_a_worker_that_has_not_left_has_a_stay_without_an_end() -> None:
    events = [event("joined", 1000), event("joined", 4000), event("joined", 5, "w2"), event("left", 7, job_id="k")]
    found = present(events)
    assert found[("j", "w1")] == (3000, 4000) and found[("j", "w2")] == (0, 5) and found[("k", "w1")] == (0, None)
