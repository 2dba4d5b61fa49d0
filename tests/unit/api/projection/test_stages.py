"""From events about stages to the job's column."""

import json
from typing import Any

import pytest

from api.projection.events.stages import MOST_POINTS, extended
from tests.unit.api.projection.test_handlers import projected

SPLIT = "split", {"stages": [{"layers": ["a", "b"], "parameters": 10}, {"layers": ["c"], "parameters": 5}]}


def held(worker: str, first: int, stop: int) -> dict[str, Any]:
    return {"worker": worker, "session": "s", "first": first, "stop": stop}


def placed(number: int, *chain: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "placed", {"number": number, "chains": [list(chain)] if chain else []}


def submission(busy_s: float) -> tuple[str, dict[str, Any]]:
    shares = [{**held("w1", 0, 1), "busy_s": busy_s, "mail_bytes": 7, "memory_bytes": 9}]
    token = f"1.0.{0:016x}"
    seconds = dict.fromkeys(("waiting", "encoding", "uploading"), 0.0) | {"computing": 2.0}
    about = {"outcome": "accepted", "worker": "w1", "nonce": "n", "base": token, "current": token, "seconds": seconds}
    return "submission", about | {
        "micro_batches": [0],
        "counted": [0],
        "bytes_up": 1,
        "bytes_down": 1,
        "stages": shares,
    }


def test_the_job_knows_who_holds_what_and_how_busy_it_is() -> None:
    projection = projected(SPLIT, placed(1, held("w1", 0, 1), held("w2", 1, 2)), submission(1.0), submission(2.0))
    known = json.loads(projection.state["stages"])
    assert [one["layers"] for one in known["stages"]] == [["a", "b"], ["c"]]
    assert [[one["worker"] for one in chain] for chain in known["chains"]] == [["w1", "w2"]]
    assert known["workers"]["w1"] == {"busy": pytest.approx(0.6), "memory_bytes": 9, "mail_bytes": 7}
    assert [event["type"] for event in projection.changes.events] == ["placed"]


def test_each_stage_of_a_run_has_a_course_that_goes_on_with_another_worker() -> None:
    placements = placed(1, held("w1", 0, 1), held("w2", 1, 2)), placed(2, held("w2", 0, 1), held("w1", 1, 2))
    projection = projected(SPLIT, placements[0], submission(1.0), placements[1], submission(2.0))
    courses = json.loads(projection.state["stages"])["courses"]
    assert courses["0"]["points"] == [0.5, 1.0] and [*courses] == ["0"]


def test_a_course_stays_short_and_keeps_its_mean() -> None:
    course: dict[str, Any] | None = None
    for number in range(1000):
        course = extended(course, 1.0 if number >= 500 else 0.0)
    assert course and MOST_POINTS // 2 <= len(course["points"]) < MOST_POINTS
    assert course["points"][0] == 0.0 and course["points"][-1] == 1.0
    assert len(course["points"]) * course["every"] + course["count"] == 1000
    assert sum(course["points"]) * course["every"] + course["sum"] == pytest.approx(500)


def test_workers_that_hold_nothing_any_more_are_forgotten() -> None:
    known = projected(SPLIT, placed(1, held("w1", 0, 2)), submission(1.0), placed(2, held("w2", 0, 2))).state["stages"]
    assert json.loads(known)["workers"] == {} and json.loads(known)["chains"][0][0]["worker"] == "w2"


def test_a_worker_that_was_given_no_stage_is_not_counted() -> None:
    projection = projected(SPLIT, placed(1, held("w2", 0, 2)), submission(1.0))
    assert json.loads(projection.state["stages"])["workers"] == {}


def test_the_samples_of_a_chain_count_for_all_of_its_workers_by_their_stages() -> None:
    token = f"1.1.{1:016x}"
    version = {"token": token, "version": 1, "epoch": 0, "loss": 1.5, "sha256": "aa", "seconds": {}}
    version |= {"counted": [[0, "w1", 10], [1, "w9", 7]]}
    chain = held("w1", 0, 1), held("w2", 1, 3)
    projection = projected(SPLIT, placed(1, *chain), submission(1.0), ("version", version))
    rows = projection.changes.workers
    assert {worker: row["samples"] for worker, row in rows.items()} == {"w1": 3, "w2": 7, "w9": 7}
    assert (rows["w1"]["accepted"], projection.changes.ledger[0]["worker"]) == (1, "w1")
    assert {*projection.rates.workers} == {"w1", "w2"}


@pytest.mark.parametrize(("first", "stop"), [(1, 1), (0, 65), (-1, 1)])
def test_a_run_of_stages_that_cannot_be_is_no_event(first: int, stop: int) -> None:
    with pytest.raises(ValueError):
        projected(SPLIT, placed(1, held("w1", first, stop)))
