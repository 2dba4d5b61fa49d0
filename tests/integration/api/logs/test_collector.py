"""The logs' streams of a real broker, taken into SQLite and read page by page."""

import json
from typing import Any

import pytest
from redis import Redis

from api.database import Database
from api.errors import NotFound
from api.jobs.service import Jobs
from api.logs import collector as collecting
from api.logs.collector import Collector
from api.logs.reader import Logs, Which
from api.logs.view import log_view
from api.projection import row_retention
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol import handshake
from computeshare.protocol.keys import RELEASE, JobKeys
from computeshare.protocol.round_store import RoundStore
from computeshare.runtime.log_lines import NAME_LENGTH, TEXT_LENGTH, TRACE_LENGTH, VALUE_LENGTH, Writer
from tests.support.log_lines import AT_MS, LAPTOP, STUDIO, put, put_raw

SPEC = JobSpec(dataset="digits", model="mlp", rounds=3)


@pytest.fixture
def job(jobs: Jobs) -> str:
    return jobs.create(SPEC).id


@pytest.fixture
def collector(database: Database) -> Collector:
    return Collector(database)


@pytest.fixture
def logs(database: Database) -> Logs:
    return Logs(database)


def texts(logs: Logs, job_id: str, **wanted: Any) -> list[str]:
    return [line.text for line in logs.page(job_id, Which(**wanted), limit=1000).items]


def test_lines_of_all_are_merged_in_the_order_of_the_stream(
    redis: Redis, job: str, collector: Collector, logs: Logs
) -> None:
    put(redis, job, "one", seconds=2.5)
    put(redis, job, "two", writer=LAPTOP, level="warning")
    put(redis, job, "three", writer=Writer("reducer", "host"))
    assert collector.step(redis) == 3
    one, two, three = logs.page(job).items
    assert (one.text, one.data, one.level, one.worker, one.name) == (
        "one",
        {"seconds": 2.5},
        "info",
        "aaaaaaaaaaaa",
        "studio",
    )
    assert one.at.timestamp() * 1000 == AT_MS and one.id < two.id < three.id
    assert redis.xlen(JobKeys(job).logs()) == 0 and collector.step(redis) == 0


def test_lines_are_chosen_by_worker_and_by_the_least_level(
    redis: Redis, job: str, collector: Collector, logs: Logs
) -> None:
    for level in ("debug", "info", "warning", "error"):
        put(redis, job, f"studio {level}", level=level)
        put(redis, job, f"laptop {level}", level=level, writer=LAPTOP)
    collector.step(redis)
    assert texts(logs, job, worker="studio", level="warning") == ["studio warning", "studio error"]
    assert texts(logs, job, worker=LAPTOP.worker, level="error") == ["laptop error"]
    assert len(texts(logs, job, level="debug")) == 8 and texts(logs, job, worker="nobody") == []
    assert logs.writers(job) == [(LAPTOP.worker, "laptop"), (STUDIO.worker, "studio")]


def test_pages_lead_back_to_the_first_line_and_on_to_the_last(
    redis: Redis, job: str, collector: Collector, logs: Logs
) -> None:
    put(redis, job, *map(str, range(7)))
    collector.step(redis)
    newest = logs.page(job, limit=3)
    middle = logs.page(job, before=newest.previous, limit=3)
    oldest = logs.page(job, before=middle.previous, limit=3)
    assert [[line.text for line in page.items] for page in (newest, middle, oldest)] == [
        ["4", "5", "6"],
        ["1", "2", "3"],
        ["0"],
    ]
    assert newest.previous == newest.items[0].id and oldest.previous is None
    after = logs.page(job, after=middle.items[0].id, before=newest.items[2].id, limit=3)
    assert [line.text for line in after.items] == ["2", "3", "4"] and after.previous is None
    assert logs.page(job, limit=7).previous is None


def test_a_crash_before_trimming_stores_no_line_twice(
    redis: Redis, job: str, collector: Collector, logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise RuntimeError("killed before the stream was trimmed")

    put(redis, job, "one", "two")
    with monkeypatch.context() as patch:
        patch.setattr(collecting, "_trim", crash)
        with pytest.raises(RuntimeError):
            collector.step(redis)
    put(redis, job, "three")
    collector.step(redis)
    assert texts(logs, job) == ["one", "two", "three"]


def test_a_broker_that_came_back_with_an_older_stream_brings_no_line_twice_and_loses_no_new_one(
    redis: Redis, job: str, collector: Collector, logs: Logs
) -> None:
    name = JobKeys(job).logs()
    put(redis, job, "one", "two")
    entries: Any = redis.xrange(name)
    collector.step(redis)
    redis.delete(name)
    redis.xadd(name, entries[0][1], id=entries[0][0])  # what was trimmed is there again, the rest is lost
    put_raw(redis, job, {"text": "another with the id of two"}, stream_id=entries[1][0].decode())
    collector.step(redis)
    assert texts(logs, job) == ["one", "two", "another with the id of two"]


def test_an_emptied_broker_takes_no_line_along_that_was_stored(
    redis: Redis, job: str, collector: Collector, logs: Logs
) -> None:
    put(redis, job, "one")
    collector.step(redis)
    RoundStore(redis, job).purge()
    put(redis, job, "two")
    collector.step(redis)
    assert texts(logs, job) == ["one", "two"]


def test_a_control_plane_of_another_protocol_keeps_the_logs_it_finds(redis: Redis, job: str) -> None:
    put(redis, job, "one")
    redis.set(JobKeys(job).round(), "of another protocol")
    before = redis.get(RELEASE)
    try:
        redis.set(RELEASE, json.dumps({"version": "0.0.1", "protocol": 1}))
        handshake.publish(redis)
        assert redis.exists(JobKeys(job).logs()) and not redis.exists(JobKeys(job).round())
    finally:
        redis.set(RELEASE, before) if before else redis.delete(RELEASE)


HOSTILE: list[Any] = [
    b"",
    b"\xff",
    b'{"text": "\\ud800"}',
    b"[]",
    b"null",
    b"[" * 100_000,
    b'{"text": ' * 20_000,
    b"{}",
    b"x" * 300_000,
    7,
]


def test_what_is_no_line_is_passed_over(redis: Redis, job: str, collector: Collector, logs: Logs) -> None:
    for data in HOSTILE:
        put_raw(redis, job, data)
    put_raw(redis, job, {"text": "of another field"}, name="dota")
    put(redis, job, "fine")
    assert collector.step(redis) == len(HOSTILE) + 2
    assert texts(logs, job) == ["fine"] and redis.xlen(JobKeys(job).logs()) == 0


def test_hostile_lines_are_bounded_and_say_nothing_to_a_terminal(
    redis: Redis, job: str, collector: Collector, logs: Logs
) -> None:
    evil = "\x1b[2J\x00\u202e\x9b" + "x" * 25_000
    fields: dict[str, Any] = {f"{i}{evil}": evil for i in range(500)} | {"exception": f"first\n\t{evil}"}
    line = {"text": f"a\nb{evil}", "worker": evil, "name": [evil], "level": evil, "at": 2**70, "data": fields}
    put_raw(redis, job, line | {"data": dict(list(fields.items())[:1]) | {"exception": fields["exception"]}})
    odd = {"nan": float("nan"), "many": 2**70, "list": [[1]], "object": {"a": {}}, "yes": True, "none": None}
    put_raw(redis, job, {"text": 5, "at": "yesterday", "level": None, "data": odd})
    put_raw(redis, job, {"text": "t", "at": True, "level": "critical", "data": "none"})
    collector.step(redis)
    first, second, third = logs.page(job).items
    assert (len(first.text), len(first.worker), len(first.name)) == (TEXT_LENGTH, NAME_LENGTH, NAME_LENGTH)
    assert first.level == "info" and len(first.data["exception"]) == TRACE_LENGTH
    assert max(len(str(v)) for k, v in first.data.items() if k != "exception") == VALUE_LENGTH
    said = first.model_dump_json() + second.model_dump_json() + third.model_dump_json()
    assert [c for c in json.loads(first.model_dump_json())["text"] if not c.isprintable()] == ["\n"]
    assert not any(c in said for c in ("\x1b", "\\u001b", "\\u0000", "\u202e", "\x9b"))
    assert second.data == {
        "nan": "nan",
        "many": str(2**70),
        "list": "[[1]]",
        "object": "{'a': {}}",
        "yes": True,
        "none": None,
    }
    assert (third.level, third.data) == ("error", {})
    seconds, _ = redis.time()
    assert all(abs(line.at.timestamp() - seconds) < 60 for line in (first, second, third))  # the stream's own time


def test_a_key_that_is_no_stream_stops_nobody_elses_log(
    redis: Redis, jobs: Jobs, job: str, collector: Collector, logs: Logs
) -> None:
    other = jobs.create(SPEC).id
    redis.set(JobKeys(job).logs(), "no stream")
    put(redis, other, "fine")
    collector.step(redis)
    put(redis, job, "works again")
    collector.step(redis)
    assert (texts(logs, other), texts(logs, job)) == (["fine"], ["works again"])


def test_only_the_newest_lines_of_a_job_are_kept(
    redis: Redis, jobs: Jobs, job: str, database: Database, logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = jobs.create(SPEC).id
    put(redis, job, *map(str, range(30)))
    put(redis, other, *map(str, range(10)))
    Collector(database).step(redis)
    monkeypatch.setattr(row_retention, "LINES_KEPT", 10)
    assert row_retention.thin(database) == 20 and row_retention.thin(database) == 0
    assert texts(logs, job) == list(map(str, range(20, 30))) and len(texts(logs, other)) == 10


def test_long_lines_are_thinned_by_what_they_take(
    redis: Redis, jobs: Jobs, job: str, database: Database, logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(redis, job, *[f"{number} {'x' * 1000}" for number in range(20)], trace="y" * 400)
    put(redis, job, "the last")
    Collector(database).step(redis)
    monkeypatch.setattr(row_retention, "LINE_BYTES_KEPT", 10_000)
    assert row_retention.thin(database) == 13 and row_retention.thin(database) == 0
    assert [text.split()[0] for text in texts(logs, job)] == [*map(str, range(13, 20)), "the"]


def test_a_flood_is_thinned_while_it_comes(
    redis: Redis, job: str, collector: Collector, logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_retention, "LINES_KEPT", 10)
    monkeypatch.setattr(collecting, "THIN_EVERY", 20)
    monkeypatch.setattr(collecting, "BATCH", 8)
    put(redis, job, *map(str, range(100)))
    kept = []
    while collector.step(redis):
        kept.append(len(texts(logs, job)))
    assert max(kept) <= 10 + 20 + 8 and texts(logs, job)[-1] == "99"


def test_a_deleted_job_takes_its_log_along(
    redis: Redis, jobs: Jobs, job: str, collector: Collector, logs: Logs, database: Database
) -> None:
    put(redis, job, "one")
    collector.step(redis)
    jobs.cancel(job)
    put(redis, job, "said while it was deleted")
    jobs.delete(job)
    collector.step(redis)
    assert database.peek("SELECT * FROM log_line") == []
    with pytest.raises(NotFound):
        logs.page(job)
    with pytest.raises(NotFound):
        logs.news(job, Which(), 0, 10)


def test_a_job_that_is_deleted_between_reading_and_storing_stops_nobody(
    redis: Redis, jobs: Jobs, job: str, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = jobs.create(SPEC).id
    put(redis, job, "one")
    read = collecting._read

    def delete_meanwhile(*arguments: Any) -> Any:
        found = read(*arguments)
        jobs.cancel(job)
        jobs.delete(job)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(collecting, "_read", delete_meanwhile)
        assert collector.step(redis) == 1
    put(redis, other, "two")
    assert collector.step(redis) == 1


def test_the_panel_shows_the_newest_lines_and_who_wrote(
    redis: Redis, job: str, collector: Collector, logs: Logs
) -> None:
    put(redis, job, *map(str, range(150)))
    put(redis, job, "reduced", writer=Writer("reducer", "host"), level="warning")
    collector.step(redis)
    view = log_view(logs, job)
    assert len(view.lines) == 100 and view.more and view.lines[-1].text == "reduced" and not view.is_open
    assert view.writers == [("reducer", "reducer"), (STUDIO.worker, f"studio ({STUDIO.worker})")]
    chosen = log_view(logs, job, "reducer", "warning")
    assert [line.text for line in chosen.lines] == ["reduced"] and chosen.is_open and not chosen.more
    assert log_view(logs, job, level="loud").level == ""
