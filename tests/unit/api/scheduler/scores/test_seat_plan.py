"""Who scores: workers that nobody wants for training, of one's own, for the versions that wait longest for nobody."""

from api.scheduler.scores.seat_plan import TRAINING, WaitingJob, plan
from api.scheduler.seat_planner import Available, Close, Demand, HeldSeat, Issue, Leave, Past
from computeshare.queue.seats import SCORING

DONE = Demand("a", "q", 0, 1, True)
TRAINS = Demand("a", "q", 2, 1, True)
BOTH = [Available("w1", ("q",)), Available("w2", ("q",))]


def waits(job_id: str = "a", checkpoints: int = 1, final: bool = False) -> WaitingJob:
    return WaitingJob(job_id, "q", checkpoints, final)


def held(worker: str, number: int = SCORING, job_id: str = "a", **more: object) -> HeldSeat:
    return HeldSeat(f"{worker}-{job_id}-{number}-1", job_id, worker, number, **{"state": "started", **more})  # type: ignore[arg-type]


def test_each_checkpoint_that_waits_gets_one_idle_worker() -> None:
    assert plan([waits()], [DONE], BOTH, [], []) == [Issue("a", "w1", SCORING)]
    assert [one.worker for one in plan([waits(checkpoints=9)], [DONE], BOTH, [], []) if isinstance(one, Issue)] == [
        "w1",
        "w2",
    ]
    serving = [Available("w1", ("q",), "w1-a-0-1"), BOTH[1]]
    assert plan([waits()], [DONE], serving, [], [held("w1")]) == []
    assert plan([waits()], [DONE], [Available("w1", ("other",))], [], []) == []


def test_no_worker_that_a_job_wants_for_training_scores() -> None:
    assert plan([waits()], [TRAINS], BOTH, [], [], [Issue("a", "w1", 1)]) == []
    assert plan([waits()], [TRAINS], BOTH, [held("w1", 1)], []) == []
    three = [*BOTH, Available("w3", ("q",))]
    assert plan([waits()], [TRAINS], three, [held("w1", 1), held("w2", 2)], []) == [Issue("a", "w3", SCORING)]
    barred_from_training = {("a", "w1")}
    assert plan([waits("b")], [TRAINS, Demand("b", "q", 0, 1, True)], BOTH[:1], [], [], out=barred_from_training) == [
        Issue("b", "w1", SCORING)
    ]


def test_a_scorer_leaves_when_it_is_wanted_for_training_or_drained() -> None:
    serving = [Available("w1", ("q",), "w1-a-0-1")]
    assert plan([waits()], [TRAINS], serving, [], [held("w1")]) == [Leave("w1-a-0-1", None, TRAINING)]
    assert plan([waits()], [TRAINS], serving, [], [held("w1", leaving_ms=1)]) == []
    assert plan([waits()], [TRAINS], serving, [], [held("w1", state="queued")]) == [
        Close("w1-a-0-1", "stopped", stop=True)
    ]
    off = [Available("w1", ("q",), "w1-a-0-1", off="drained")]
    assert plan([waits()], [DONE], off, [], [held("w1")]) == [Leave("w1-a-0-1", None, "drained")]


def test_last_versions_come_first_then_the_jobs_with_the_fewest_scorers() -> None:
    demands = [DONE, Demand("b", "q", 0, 1, True)]
    waiting = [waits("a", 5), waits("b", 1, final=True)]
    assert [one.job_id for one in plan(waiting, demands, BOTH, [], []) if isinstance(one, Issue)] == ["b", "a"]
    waiting = [waits("a", 5), waits("b", 5)]
    assert [one.job_id for one in plan(waiting, demands, BOTH, [], []) if isinstance(one, Issue)] == ["a", "b"]


def test_machines_of_others_resting_workers_and_those_that_just_failed_do_not_score() -> None:
    assert plan([waits()], [DONE], BOTH, [], [], barred={"w1"}) == [Issue("a", "w2", SCORING)]
    assert plan([waits()], [DONE], [Available("w1", ("q",), resting="on battery")], [], []) == []
    failed = [Past("w1-a-0-1", "a", "w1", "failed", 100)]
    assert plan([waits()], [DONE], BOTH[:1], [], [], past=failed) == []
    long_ago = [Past("w1-a-0-1", "a", "w1", "failed", 1500)]
    assert plan([waits()], [DONE], BOTH[:1], [], [], past=long_ago) == [Issue("a", "w1", SCORING)]
    assert plan([waits()], [DONE], BOTH, [], [], past=long_ago) == [Issue("a", "w2", SCORING)]


def test_the_seat_of_a_dead_scorer_is_closed_and_another_takes_its_place() -> None:
    assert plan([waits()], [DONE], BOTH[1:], [], [held("w1")]) == [
        Close("w1-a-0-1", "lost", stop=True),
        Issue("a", "w2", SCORING),
    ]
