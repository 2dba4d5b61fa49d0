"""Which worker gets which seat."""

from api.scheduler.reasons import Reason
from api.scheduler.seat_planner import LEAVE_MS, STUCK_MS, Available, Close, Demand, HeldSeat, Issue, Past, decide_seats
from api.scheduler.shortage import shortage


def demand(job: str = "job1", seats: int = 4, minimum: int = 1, started: bool = False, queue: str = "q") -> Demand:
    return Demand(job, queue, seats, minimum, started)


def worker(name: str, seat: str | None = None, queue: str = "q", resting: str = "") -> Available:
    return Available(name, (queue,), seat, resting)


def held(
    worker: str,
    job: str = "job1",
    number: int = 1,
    state: str = "started",
    waiting_ms: int = 0,
    stopped: int | None = None,
) -> HeldSeat:
    return HeldSeat(f"{worker}-{job}-{number}-1", job, worker, number, state, waiting_ms, stopped)


def test_every_free_worker_of_the_queue_gets_a_seat_up_to_the_maximum() -> None:
    workers = [worker("w1"), worker("w2"), worker("w3"), worker("x", queue="other")]
    assert decide_seats([demand(seats=2)], workers, []) == [Issue("job1", "w1", 1), Issue("job1", "w2", 2)]


def test_nothing_happens_once_everyone_has_a_seat() -> None:
    seats = [held("w1", number=1), held("w2", number=2)]
    workers = [worker("w1", seats[0].id), worker("w2", seats[1].id)]
    assert decide_seats([demand(started=True)], workers, seats) == []


def test_no_seat_before_enough_workers_are_there() -> None:
    assert decide_seats([demand(minimum=2)], [worker("w1")], []) == []
    both = decide_seats([demand(minimum=2)], [worker("w1"), worker("w2")], [])
    assert [a.worker for a in both if isinstance(a, Issue)] == ["w1", "w2"]


def test_a_job_that_has_begun_goes_on_with_fewer_than_its_minimum() -> None:
    assert decide_seats([demand(minimum=3, started=True)], [worker("w1")], []) == [Issue("job1", "w1", 1)]


def test_oldest_job_is_served_first_and_a_worker_has_one_seat_at_a_time() -> None:
    actions = decide_seats([demand("old", seats=2), demand("new")], [worker("w1"), worker("w2"), worker("w3")], [])
    assert actions == [Issue("old", "w1", 1), Issue("old", "w2", 2), Issue("new", "w3", 1)]


def test_a_job_that_cannot_begin_leaves_its_workers_to_the_next() -> None:
    actions = decide_seats([demand("old", minimum=3), demand("new")], [worker("w1"), worker("w2")], [])
    assert {(a.job_id, a.worker) for a in actions if isinstance(a, Issue)} == {("new", "w1"), ("new", "w2")}


def test_seat_of_a_dead_worker_is_lost_and_given_to_another() -> None:
    seat = held("dead")
    actions = decide_seats([demand(seats=1, started=True)], [worker("w2")], [seat])
    assert actions == [Close(seat.id, "lost", stop=True), Issue("job1", "w2", 1)]


def test_numbers_in_use_are_left_out() -> None:
    seat = held("w1", number=2)
    actions = decide_seats([demand(seats=3, started=True)], [worker("w1", seat.id), worker("w2"), worker("w3")], [seat])
    assert [(a.worker, a.number) for a in actions if isinstance(a, Issue)] == [("w2", 1), ("w3", 3)]


def test_seat_that_the_broker_lost_is_issued_again() -> None:
    seat = held("w1", state="missing")
    actions = decide_seats([demand(started=True)], [worker("w1")], [seat])
    assert actions == [Close(seat.id, "lost", stop=False), Issue("job1", "w1", 1)]


def test_seat_not_handed_over_yet_is_not_missed() -> None:
    assert decide_seats([demand()], [worker("w1")], [held("w1", state="pending", waiting_ms=STUCK_MS + 1)]) == []


def test_seat_that_an_idle_worker_never_begins_is_issued_again() -> None:
    seat = held("w1", state="queued", waiting_ms=STUCK_MS + 1)
    actions = decide_seats([demand(started=True)], [worker("w1")], [seat])
    assert actions == [Close(seat.id, "lost", stop=True), Issue("job1", "w1", 1)]
    assert decide_seats([demand(started=True)], [worker("w1")], [held("w1", state="queued", waiting_ms=1000)]) == []


def test_seats_of_an_ended_or_paused_job_leave_by_themselves_before_they_are_stopped() -> None:
    running = held("w1", stopped=LEAVE_MS - 1)
    assert decide_seats([], [worker("w1", running.id)], [running]) == []
    overdue = held("w1", stopped=LEAVE_MS + 1)
    assert decide_seats([], [worker("w1", overdue.id)], [overdue]) == [Close(overdue.id, "stopped", stop=True)]
    queued = held("w1", state="queued", stopped=1)
    assert decide_seats([], [worker("w1")], [queued]) == [Close(queued.id, "stopped", stop=True)]


def test_finished_seat_of_a_job_without_rounds_left_is_closed_and_not_replaced() -> None:
    seat = held("w1", state="finished")
    assert decide_seats([demand(seats=0, started=True)], [worker("w1")], [seat]) == [
        Close(seat.id, "finished", stop=False)
    ]


def test_worker_that_serves_an_unknown_seat_is_left_alone() -> None:
    assert decide_seats([demand()], [worker("w1", seat="w1-other-1-1")], []) == []


def test_worker_whose_seats_keep_ending_waits_longer_each_time() -> None:
    def past(times: int, ago: int) -> list[Past]:
        return [Past(f"s{n}", "job1", "w1", "failed", ago + n) for n in range(times)]

    for times, ago, issued in ((1, 999, False), (1, 1001, True), (3, 3999, False), (3, 4001, True), (9, 29_999, False)):
        actions = decide_seats([demand(started=True)], [worker("w1")], [], past(times, ago))
        assert bool(actions) is issued, (times, ago)
    assert decide_seats([demand("other")], [worker("w1")], [], past(9, 0)) == [Issue("other", "w1", 1)]


def test_worker_whose_seat_has_just_failed_waits() -> None:
    seat = held("w1", state="failed")
    assert decide_seats([demand(started=True)], [worker("w1")], [seat]) == [Close(seat.id, "failed", stop=False)]


def test_shortage_says_what_is_needed_and_what_there_is() -> None:
    assert shortage(demand(), [], []) == Reason("workers", "Needs 1 worker on queue q, 0 are online", 1)
    few = Reason("workers", "Needs 3 workers on queue q, 1 is online", 2)
    assert shortage(demand(minimum=3), [worker("w1")], []) == few
    busy = [held("w1", job="other")]
    told = "Needs 1 worker on queue q, 1 is online, 1 busy with other jobs"
    assert shortage(demand(), [worker("w1")], busy) == Reason("workers", told, 1)


def test_a_job_that_lost_workers_says_how_many_it_waits_for() -> None:
    both = [held("w1"), held("w2")]
    running = demand(minimum=3, started=True)
    told = Reason("workers", "Needs 3 workers on queue q, 2 are online", 1)
    assert shortage(running, [worker("w1"), worker("w2")], both) == told
    assert shortage(running, [worker("w1"), worker("w2"), worker("w3")], both) is None  # it gets its seat


def test_no_shortage_where_a_seat_is_held_or_soon_will_be() -> None:
    assert shortage(demand(), [worker("w1")], []) is None
    assert shortage(demand(), [worker("w1")], [held("w1")]) is None
    assert shortage(demand(seats=0), [], []) is None


def test_a_resting_worker_gets_no_seat_and_keeps_the_one_it_is_about_to_leave() -> None:
    assert decide_seats([demand()], [worker("w1", resting="its machine sleeps")], []) == []
    seat = held("w1")
    assert decide_seats([demand(started=True)], [worker("w1", seat.id, resting="on battery")], [seat]) == []


def test_a_seat_that_a_resting_worker_has_not_begun_is_taken_back() -> None:
    seat = held("w1", state="queued")
    workers = [worker("w1", resting="on battery"), worker("w2")]
    actions = decide_seats([demand(started=True, seats=1)], workers, [seat])
    assert actions == [Close(seat.id, "stopped", stop=True), Issue("job1", "w2", 1)]


def test_a_shortage_counts_those_that_rest_by_their_reasons() -> None:
    workers = [worker("w1"), worker("w2", resting="on battery until 50 %"), worker("w3", resting="its machine sleeps")]
    workers.append(worker("w4", resting="on battery until 50 %"))
    told = "Needs 2 workers on queue q, 4 are online; 2 resting: on battery until 50 %; 1 resting: its machine sleeps"
    assert shortage(demand(minimum=2), workers, []) == Reason("workers", told, 1)
    assert shortage(demand(minimum=1), workers, []) is None
