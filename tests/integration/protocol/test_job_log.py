"""What a process logs, on its way into the logs of jobs, over a broker that is sometimes full or away."""

import json
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from redis import Redis
from rq import Queue
from rq.serializers import JSONSerializer

from computeshare.protocol import job_log as logs_module
from computeshare.protocol.job_log import JobLog, log_warnings, tell
from computeshare.protocol.keys import JobKeys
from computeshare.protocol.round_store import RoundStore
from computeshare.queue import Seat
from computeshare.queue.seats import SeatJob
from computeshare.runtime.log_lines import BURST, MOST_WAITING, Writer
from computeshare.runtime.processes import configure_logging
from computeshare.transport.connections import connect
from computeshare.up.embedded_broker import EmbeddedBroker
from computeshare.worker.rq_worker import SeatWorker
from tests.support.wait import wait_until

WRITER = Writer("aaaaaaaaaaaa", "studio")
log = structlog.get_logger()


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Logging and warnings are everybody's."""
    show, before = warnings.showwarning, structlog.get_config()
    yield
    warnings.showwarning = show
    structlog.configure(**before)


@pytest.fixture
def job(redis: Redis, job_id: str) -> str:
    RoundStore(redis, job_id).publish("{}")
    return job_id


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs_module, "SEND_EVERY_S", 0.02)
    monkeypatch.setattr(logs_module, "LONGEST_PAUSE_S", 0.1)


def lines(redis: Redis, job_id: str) -> list[dict[str, Any]]:
    entries: Any = redis.xrange(JobKeys(job_id).logs())
    return [json.loads(fields[b"data"]) for _, fields in entries]


def refusals(redis: Redis) -> int:
    """How often the broker has refused something for want of memory."""
    stats: Any = redis.info("errorstats")
    return int(stats.get("errorstat_OOM", {}).get("count", 0))


def test_what_is_logged_about_a_job_is_in_its_log_and_still_printed(
    redis: Redis, redis_url: str, job: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with JobLog(redis_url, WRITER, job) as job_log:
        configure_logging(job_log.capture)
        log.info("loaded", job=job, seconds=2.5)
        log.warning("of this process's job, which need not be named")
        log.debug("too fine")
    first, second = lines(redis, job)
    assert (first["text"], first["level"], first["data"]) == ("loaded", "info", {"seconds": 2.5})
    assert (first["worker"], first["name"], second["level"]) == ("aaaaaaaaaaaa", "studio", "warning")
    assert abs(first["at"] / 1000 - time.time()) < 60
    printed = capfd.readouterr().err
    assert "loaded" in printed and "seconds" in printed


def test_a_process_of_many_jobs_sends_each_its_own_and_nothing_else(redis: Redis, redis_url: str, job: str) -> None:
    other = f"{job}x"
    RoundStore(redis, other).publish("{}")
    with JobLog(redis_url, WRITER) as job_log:
        configure_logging(job_log.capture)
        log.info("reducer ready")
        log.info("claimed", job=job)
        log.info("claimed too", job=other)
        log.info("again", job=job)
    assert [line["text"] for line in lines(redis, job)] == ["claimed", "again"]
    assert [line["text"] for line in lines(redis, other)] == ["claimed too"]


def test_the_error_that_ends_a_process_is_its_last_line_with_its_traceback(
    redis: Redis, redis_url: str, job: str
) -> None:
    with pytest.raises(ZeroDivisionError), JobLog(redis_url, WRITER, job):
        1 / 0  # noqa: B018
    (line,) = lines(redis, job)
    assert (line["text"], line["level"]) == ("crashed: ZeroDivisionError: division by zero", "error")
    assert "1 / 0" in line["data"]["exception"] and line["data"]["exception"].startswith("Traceback")


def test_warnings_of_libraries_are_logged(redis: Redis, redis_url: str, job: str) -> None:
    with JobLog(redis_url, WRITER, job) as job_log:
        configure_logging(job_log.capture)
        log_warnings()
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            log_warnings()
            warnings.warn("100 % of this is old", DeprecationWarning, stacklevel=1)
    (line,) = lines(redis, job)
    assert (line["text"], line["level"]) == ("100 % of this is old", "warning")
    assert line["data"]["kind"] == "DeprecationWarning" and line["data"]["where"].startswith("test_job_log.py:")


def test_a_value_that_has_no_text_fails_nothing(redis: Redis, redis_url: str, job: str) -> None:
    class Wordless:
        def __str__(self) -> str:
            raise RuntimeError("no words")

        def __repr__(self) -> str:
            return "wordless"

    with JobLog(redis_url, WRITER, job) as job_log:
        configure_logging(job_log.capture)
        log.info("odd", value=Wordless())
        log.info("fine")
    assert [line["text"] for line in lines(redis, job)] == ["fine"]


def test_too_many_lines_at_a_time_are_counted_instead(redis: Redis, redis_url: str, job: str) -> None:
    with JobLog(redis_url, WRITER, job) as job_log:
        for number in range(BURST + 300):
            job_log.capture(None, "info", {"event": str(number), "level": "info"})
    told = [line["text"] for line in lines(redis, job)]
    dropped = [text for text in told if "dropped" in text]
    assert len(dropped) >= 1 and BURST <= len(told) - len(dropped) < BURST + 100
    assert sum(int(text.split()[0]) for text in dropped) + len(told) - len(dropped) == BURST + 300


def test_a_broker_that_was_away_gets_what_was_logged_meanwhile(quick: None, tmp_path: Path, job_id: str) -> None:
    broker = EmbeddedBroker.start(tmp_path / "broker.log")
    place, url = broker.place, broker.url
    broker.stop()
    with JobLog(url, WRITER, job_id) as job_log:
        started = time.monotonic()
        for number in range(100):
            job_log.capture(None, "info", {"event": str(number), "level": "info"})
        assert time.monotonic() - started < 1  # nobody waits
        broker = EmbeddedBroker.start(tmp_path / "broker.log", place=place)
        try:
            with connect(broker.url, retries=0) as redis:
                RoundStore(redis, job_id).publish("{}")
                job_log.capture(None, "info", {"event": "back", "level": "info"})
                wait_until(lambda: lines(redis, job_id) and lines(redis, job_id)[-1]["text"] == "back")
        finally:
            broker.stop()


def test_a_broker_without_memory_delays_lines_and_the_oldest_give_way(
    quick: None, tmp_path: Path, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs_module, "BURST", 10_000)
    broker = EmbeddedBroker.start(tmp_path / "broker.log")
    try:
        with connect(broker.url, retries=0) as redis, JobLog(broker.url, WRITER, job_id) as job_log:
            RoundStore(redis, job_id).publish("{}")
            redis.config_set("maxmemory", 1)
            for number in range(MOST_WAITING + 50):
                job_log.capture(None, "info", {"event": str(number), "level": "info"})
            wait_until(lambda: refusals(redis) >= 3)
            assert redis.xlen(JobKeys(job_id).logs()) == 0
            redis.config_set("maxmemory", 0)
            wait_until(lambda: redis.xlen(JobKeys(job_id).logs()) > MOST_WAITING)
            told = [line["text"] for line in lines(redis, job_id)]
            assert told == ["50 lines were dropped here: too many at a time", *map(str, range(50, MOST_WAITING + 50))]
    finally:
        broker.stop()


def test_a_process_ends_in_time_though_the_broker_does_not_answer(tmp_path: Path, job_id: str) -> None:
    started = time.monotonic()
    with JobLog(f"unix://{tmp_path}/nobody.sock", WRITER, job_id) as job_log:
        job_log.capture(None, "info", {"event": "into the void", "level": "info"})
    assert time.monotonic() - started < logs_module.PATIENCE_S + 1


def test_a_job_that_is_gone_gets_no_key_back(redis: Redis, redis_url: str, job: str) -> None:
    with JobLog(redis_url, WRITER, job) as job_log:
        RoundStore(redis, job).purge()
        job_log.capture(None, "info", {"event": "too late", "level": "info"})
    tell(redis, job, WRITER, event="too late as well", level="error")
    assert list(redis.scan_iter(JobKeys(job).pattern())) == []


def test_a_worker_tells_in_the_jobs_log_that_a_seats_process_died(redis: Redis, job: str) -> None:
    seat = Seat(WRITER.worker, job, 1, 1)
    queue = Queue(WRITER.worker, connection=redis, job_class=SeatJob, serializer=JSONSerializer)
    worker = SeatWorker([queue], WRITER.worker, connection=redis, prepare_for_work=False, shown_name="studio")

    class Died:
        id = seat.id

    worker.handle_work_horse_killed(Died(), 1, 9, None)  # type: ignore[arg-type]
    worker.handle_work_horse_killed(Died(), 1, 3 << 8, None)  # type: ignore[arg-type]
    assert [(line["text"], line["level"], line["worker"], line["name"]) for line in lines(redis, job)] == [
        ("the seat's process died: killed by signal 9", "error", *("aaaaaaaaaaaa", "studio")),
        ("the seat's process died: exit code 3", "error", *("aaaaaaaaaaaa", "studio")),
    ]
