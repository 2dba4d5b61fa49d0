"""Which checkpoint is scored next: no job waits for another's backlog."""

from computeshare.evaluator.order import in_turn
from computeshare.types import Token


def checkpoints(*versions: int) -> list[Token]:
    return [Token(1, version, f"{version:016x}") for version in versions]


def test_a_job_is_not_kept_waiting_by_the_backlog_of_another() -> None:
    waiting = {"aaaa": checkpoints(*range(1, 301)), "bbbb": checkpoints(1, 2)}
    last, served, scores = {"aaaa": 1000, "bbbb": 1000}, dict[str, int](), dict.fromkeys(waiting, 0)
    for turn in range(4):
        job, token = next(in_turn(waiting, last, served))
        waiting[job].remove(token)
        served[job] = turn
        scores[job] += 1
    assert scores == {"aaaa": 2, "bbbb": 2}


def test_a_job_that_may_stop_early_and_is_trained_to_its_end_keeps_no_other_waiting() -> None:
    waiting = {"stopper": checkpoints(*range(1, 301)), "other": checkpoints(*range(1, 301))}
    last, served, scores = {"stopper": 300, "other": 1000}, dict[str, int](), dict.fromkeys(waiting, 0)
    for turn in range(300):
        job, token = next(in_turn(waiting, last, served, {"stopper"}))
        waiting[job].remove(token)
        served[job] = turn
        scores[job] += 1
    assert scores == {"stopper": 150, "other": 150}


def test_a_last_version_comes_before_all_that_are_on_their_way() -> None:
    waiting = {"aaaa": checkpoints(10, 20), "bbbb": checkpoints(10, 30), "cccc": checkpoints(5)}
    order = list(in_turn(waiting, {"aaaa": 30, "bbbb": 30, "cccc": 30}, {"aaaa": 1, "bbbb": 3, "cccc": 2}))
    assert [(job, token.version) for job, token in order] == [
        ("bbbb", 30),
        ("aaaa", 20),
        ("cccc", 5),
        ("bbbb", 10),
        ("aaaa", 10),
    ]


def test_a_job_that_may_stop_early_has_its_oldest_checkpoint_scored_first() -> None:
    waiting = {"aaaa": checkpoints(20, 10, 30), "bbbb": checkpoints(10, 20)}
    order = list(in_turn(waiting, {"aaaa": 30, "bbbb": 30}, {}, oldest_first={"aaaa"}))
    assert [(job, token.version) for job, token in order] == [
        ("aaaa", 10),
        ("bbbb", 20),
        ("aaaa", 20),
        ("bbbb", 10),
        ("aaaa", 30),
    ]


def test_nothing_is_due_where_nothing_waits() -> None:
    assert list(in_turn({"aaaa": []}, {"aaaa": 3}, {})) == [] == list(in_turn({}, {}, {}))
