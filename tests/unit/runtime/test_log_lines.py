"""Lines of a job's log: how large, how many, how often."""

import json
import threading
from pathlib import Path

import pytest

from computeshare.protocol.keys import JobKeys, outlives_rounds
from computeshare.runtime.log_lines import (
    AT_ONCE,
    BURST,
    LEVELS,
    MOST_FIELDS,
    RATE_PER_S,
    TEXT_LENGTH,
    TRACE_LENGTH,
    VALUE_LENGTH,
    Backlog,
    Batch,
    Budget,
    Seldom,
    Writer,
    called,
    fields_text,
    level_of,
    levels_from,
    line_of,
)

WRITER = Writer("aaaaaaaaaaaa", "studio")


class Clock:
    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def backlog(clock: Clock) -> Backlog:
    return Backlog(Budget(1000, 1000, clock), most=5)


def test_a_line_holds_what_was_said_and_who_said_it() -> None:
    event = {"event": "loaded", "level": "info", "timestamp": "12:00:00", "job": "j1", "seconds": 2.5, "cpu": None}
    assert json.loads(line_of(event, WRITER, 1234)) == {
        "at": 1234,
        "level": "info",
        "worker": "aaaaaaaaaaaa",
        "name": "studio",
        "text": "loaded",
        "data": {"seconds": 2.5, "cpu": None},
    }


def test_however_much_is_said_a_line_is_bounded() -> None:
    event = {f"field {i}": "v" * 100_000 for i in range(1000)}
    event |= {"event": "t" * 100_000, "exception": "Traceback" + "x" * 100_000 + "ValueError: the end"}
    line = json.loads(line_of(event, WRITER, 0))
    trace = line["data"].pop("exception")
    assert len(line["text"]) == TEXT_LENGTH and len(line["data"]) == MOST_FIELDS
    assert {len(value) for value in line["data"].values()} == {VALUE_LENGTH}
    assert len(trace) == TRACE_LENGTH <= 4096 and trace.count("…") == 1
    assert trace.startswith("Traceback") and trace.endswith("ValueError: the end")


def test_values_that_json_has_no_word_for_become_text() -> None:
    event = {"event": "e", "path": Path("/x"), "nan": float("nan"), "many": 2**70, "yes": True, "bytes": b"\x00"}
    event["odd"] = "\ud800"
    data = json.loads(line_of(event, WRITER, 0))["data"]
    assert data == {"path": "/x", "nan": "nan", "many": str(2**70), "yes": True, "bytes": "b'\\x00'", "odd": "?"}


def test_a_level_includes_what_is_more_important() -> None:
    assert [levels_from(level) for level in LEVELS] == [LEVELS, LEVELS[1:], LEVELS[2:], ("error",)]
    assert [level_of(name) for name in ("warning", "critical", "exception", "?", 3, None)] == [
        "warning",
        "error",
        "error",
        "info",
        "info",
        "info",
    ]


def test_a_budget_allows_a_burst_then_a_rate(clock: Clock) -> None:
    budget = Budget(RATE_PER_S, BURST, clock)
    assert sum(budget.spend() for _ in range(1000)) == BURST
    clock.s += 2.0
    assert sum(budget.spend() for _ in range(1000)) == 2 * RATE_PER_S
    clock.s += 3600.0
    assert sum(budget.spend() for _ in range(1000)) == BURST
    clock.s -= 3600.0  # a clock that goes back allows nothing, and breaks nothing
    assert not budget.spend()


def test_the_same_remark_is_made_seldom_and_says_how_often_it_was_not(clock: Clock) -> None:
    seldom = Seldom(30, clock)
    assert [seldom.passes("stale") for _ in range(4)] == [0, None, None, None]
    assert seldom.passes("slow") == 0
    clock.s += 30
    assert [seldom.passes("stale"), seldom.passes("slow"), seldom.passes("slow")] == [3, 0, None]


def test_a_remark_is_told_with_how_often_its_kind_was_held_back(clock: Clock) -> None:
    seldom, said = Seldom(30, clock), list[tuple[str, int, int]]()

    def say(event: str, number: int, others_since_last_told: int) -> None:
        said.append((event, number, others_since_last_told))

    for number in range(3):
        seldom.tell(say, "slow", number=number)
    seldom.tell(say, "away", "reset", number=9)
    seldom.tell(say, "away", "refused", number=10)
    clock.s += 30
    seldom.tell(say, "slow", number=11)
    assert said == [("slow", 0, 0), ("away", 9, 0), ("away", 10, 0), ("slow", 11, 2)]


def test_lines_leave_in_the_order_of_their_coming_job_by_job(backlog: Backlog) -> None:
    for job_id, line in (("a", "1"), ("a", "2"), ("b", "3"), ("a", "4")):
        backlog.put(job_id, line)
    taken = [backlog.take() for _ in range(4)]
    assert taken == [Batch("a", ("1", "2")), Batch("b", ("3",)), Batch("a", ("4",)), None]


def test_of_too_many_lines_the_oldest_give_way_and_are_counted(backlog: Backlog) -> None:
    for number in range(8):
        backlog.put("a", str(number))
    assert backlog.take() == Batch("a", ("3", "4", "5", "6", "7"), dropped=3)


def test_lines_that_come_too_fast_are_counted_not_kept(clock: Clock) -> None:
    backlog = Backlog(Budget(1, 2, clock))
    for number in range(5):
        backlog.put("a", str(number))
    assert backlog.take() == Batch("a", ("0", "1"), dropped=3)
    backlog.put("b", "5")
    assert [backlog.take(), backlog.take()] == [Batch("b", (), dropped=1), None]  # also where nothing follows
    clock.s += 1
    backlog.put("a", "6")
    assert backlog.take() == Batch("a", ("6",))


def test_what_could_not_be_sent_waits_before_what_came_meanwhile(backlog: Backlog) -> None:
    for number in range(7):
        backlog.put("a", str(number))
    batch = backlog.take()
    assert batch is not None and batch.dropped == 2
    backlog.put("a", "7")
    backlog.give_back(batch)
    assert backlog.take() == Batch("a", ("3", "4", "5", "6", "7"), dropped=3)


def test_a_batch_is_bounded(clock: Clock) -> None:
    backlog = Backlog(Budget(1000, 1000, clock))
    for number in range(AT_ONCE + 1):
        backlog.put("a", str(number))
    first, second = backlog.take(), backlog.take()
    assert first and second and (len(first.lines), len(second.lines)) == (AT_ONCE, 1)


def test_no_line_of_several_threads_is_lost_or_counted_twice() -> None:
    backlog = Backlog(Budget(1e9, 10**9), most=300)

    def put(name: str) -> None:
        for number in range(500):
            backlog.put(name, str(number))

    threads = [threading.Thread(target=put, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept, dropped = 0, 0
    while batch := backlog.take():
        kept, dropped = kept + len(batch.lines), dropped + batch.dropped
    assert (kept, dropped) == (300, 1700)


def test_fields_are_told_as_people_write_them() -> None:
    data = {"seconds": 2.5, "model": "lenet5", "why": "too late", "none": None, "": "", "exception": "Traceback"}
    assert fields_text(data) == 'seconds=2.5 model=lenet5 why="too late" none=null =""'


def test_a_worker_is_called_by_its_name_and_a_service_by_what_it_does() -> None:
    assert [called("aaaa", "studio"), called("aaaa", ""), called("reducer", "host")] == ["studio", "aaaa", "reducer"]


def test_a_jobs_log_outlives_its_rounds() -> None:
    keys = JobKeys("j1")
    assert outlives_rounds(keys.logs()) and not outlives_rounds(keys.round())
