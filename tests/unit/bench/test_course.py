"""What is told of a training's course: rates, bytes, and when an accuracy was reached."""

import pytest

from bench import peer_ddp
from bench.links import Moved
from bench.support.course import Course, Point
from bench.support.meter import Meter
from bench.support.ours import busy

SLOW_START = Course(
    tuple(Point(v, 5.0 + 0.5 * v, 64 * v, 1000.0 * v, 3000.0 * v) for v in range(1, 21)),
    {5: 0.90, 10: 0.96, 15: 0.95, 20: 0.97},
)


def test_rates_leave_out_the_start() -> None:
    assert SLOW_START.rounds_per_s == pytest.approx(2.0)
    assert SLOW_START.samples_per_s == pytest.approx(128.0)
    assert SLOW_START.bytes_per_round == pytest.approx((1000.0, 3000.0))
    assert SLOW_START.timed()[0].version == 3  # a tenth of twenty versions is not timed


def test_two_versions_give_a_rate_and_one_does_not() -> None:
    two = Course((Point(1, 40.0, 64), Point(2, 76.0, 128)))
    assert two.rounds_per_s == pytest.approx(1 / 36)
    with pytest.raises(ValueError, match="1 versions came"):
        _ = Course(two.points[:1]).rounds_per_s


def test_accuracy_is_that_of_the_last_scored_version_within_the_samples() -> None:
    assert SLOW_START.accuracy_at(64 * 14) == 0.96
    assert SLOW_START.accuracy_at(64 * 15) == 0.95
    assert SLOW_START.accuracy_at(64 * 4) is None


def test_an_accuracy_is_reached_by_the_first_version_that_has_it() -> None:
    reached = SLOW_START.reached(0.955)
    assert reached is not None and (reached.version, reached.seconds) == (10, 10.0)
    assert SLOW_START.reached(0.98) is None


def test_what_moved_between_two_moments_is_read_between_readings() -> None:
    meter = Meter()
    for second, total in ((10.0, 0), (11.0, 1000), (12.0, 5000)):
        meter.note(second, Moved(total, 2 * total))
    assert meter.between(10.5, 11.5) == pytest.approx((2500.0, 5000.0))
    assert meter.between(0.0, 99.0) == pytest.approx((5000.0, 10_000.0))  # nothing is made up outside of the readings


def test_nothing_moved_where_nothing_was_read() -> None:
    assert Meter().between(0.0, 1.0) == (0.0, 0.0)


def test_what_a_rank_tells_becomes_a_course_without_its_pauses() -> None:
    meter = Meter()
    meter.note(100.0, Moved(0, 0))
    meter.note(104.0, Moved(4000, 8000))
    told = [
        {"began": 100.0},
        {"version": 1, "at": 101.0, "seconds": 1.0},
        {"version": 1, "accuracy": 0.5},  # scored for two seconds
        {"version": 2, "at": 104.0, "seconds": 2.0},
    ]
    course = peer_ddp.course(told, 64, meter)
    assert course.points == (Point(1, 1.0, 64, 1000.0, 2000.0), Point(2, 2.0, 128, 4000.0, 8000.0))
    assert course.accuracy == {1: 0.5} and course.rounds_per_s == 1.0


def test_a_worker_is_busy_for_the_share_of_its_time_that_it_computes() -> None:
    def row(worker: str, at_s: float, computing_s: float) -> dict[str, object]:
        times = {"computing_s": computing_s, "encoding_s": 0.25, "uploading_s": 0.25}
        return {"worker": worker, "at_ms": 1000 * at_s, **times}

    rows = [row("a", 100.0, 1.5), row("b", 100.0, 0.5), row("a", 102.0, 1.5), row("b", 109.0, 0.5)]
    assert busy(rows) == pytest.approx({"a": 3.0 / 4.0, "b": 1.0 / 10.0})
