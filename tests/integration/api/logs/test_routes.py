"""The log of a job over REST and as a stream, and the command line on it, from a real server."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from redis import Redis

from api.schemas import LogLinePublic
from computeshare.cli.main import app
from computeshare.client import Client
from computeshare.client.api.models import LogLine
from computeshare.protocol.keys import JobKeys
from computeshare.settings import Settings
from computeshare.terminal.command import run
from tests.support.log_lines import LAPTOP, put, put_raw
from tests.support.served_api import serving
from tests.support.sse import events
from tests.support.wait import wait_until

SPEC: dict[str, Any] = {"dataset": "digits", "model": "mlp", "rounds": 2}


@pytest.fixture
def served(settings: Settings) -> Iterator[str]:
    with serving(settings) as (url, _):
        yield url


@pytest.fixture
def http(served: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=served, headers={"Authorization": "Bearer secret"}, timeout=10) as http:
        yield http


@pytest.fixture
def client(served: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setenv("COMPUTESHARE_URL", served)
    monkeypatch.setenv("COMPUTESHARE_TOKEN", "secret")
    with Client(served, "secret") as client:
        yield client


@pytest.fixture
def job(http: httpx2.Client) -> str:
    return str(http.post("/v1/jobs", json=SPEC).json()["id"])


def follow(lines: Iterator[str], count: int) -> list[dict[str, Any]]:
    stream = events(lines)
    return [next(stream) for _ in range(count)]


def test_the_clients_words_are_the_apis_of_the_log() -> None:
    assert set(LogLine.__annotations__) == set(LogLinePublic.model_fields)


def test_a_line_is_sent_live_and_the_stream_goes_on_after_the_last_one_a_client_saw(
    http: httpx2.Client, redis: Redis, job: str
) -> None:
    put(redis, job, "one", "two")
    with http.stream("GET", f"/v1/jobs/{job}/logs/stream") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.iter_lines()
        first = follow(lines, 2)
        assert [(e["event"], e["data"]["text"]) for e in first] == [("line", "one"), ("line", "two")]
        put(redis, job, "three")
        (third,) = follow(lines, 1)
        assert third["data"]["text"] == "three" and int(third["id"]) == third["data"]["id"]
    seen = first[0]["id"]
    for headers, query in (({"Last-Event-ID": seen}, ""), ({}, f"?after={seen}")):
        with http.stream("GET", f"/v1/jobs/{job}/logs/stream{query}", headers=headers) as response:
            assert [e["data"]["text"] for e in follow(response.iter_lines(), 2)] == ["two", "three"]


def test_stream_and_pages_take_the_same_filters(http: httpx2.Client, redis: Redis, job: str) -> None:
    for level in ("info", "warning", "error"):
        put(redis, job, f"studio {level}", level=level)
        put(redis, job, f"laptop {level}", level=level, writer=LAPTOP)
    query = "?worker=laptop&level=warning"
    with http.stream("GET", f"/v1/jobs/{job}/logs/stream{query}") as response:
        streamed = [e["data"] for e in follow(response.iter_lines(), 2)]
    page = http.get(f"/v1/jobs/{job}/logs{query}").json()
    assert [line["text"] for line in page["items"]] == ["laptop warning", "laptop error"]
    assert page["items"] == streamed and page["previous"] is None


def test_the_stream_ends_after_the_job_with_what_was_said_last(http: httpx2.Client, redis: Redis, job: str) -> None:
    about = {"worker": "aaaaaaaaaaaa", "session": "s", "seat": "s", "name": "studio", "device": "cpu"}
    redis.xadd(JobKeys(job).events(), {"type": "joined", "at": 1_700_000_000_000, "data": json.dumps(about)})
    with http.stream("GET", f"/v1/jobs/{job}/logs/stream") as response:
        lines = response.iter_lines()
        put(redis, job, "joined")
        assert follow(lines, 1)[0]["data"]["text"] == "joined"
        wait_until(lambda: http.get(f"/v1/jobs/{job}").json()["status"] == "running")
        http.post(f"/v1/jobs/{job}/cancel")
        put(redis, job, "leaving")
        assert [(e["event"], e["data"].get("text")) for e in events(lines)] == [("line", "leaving"), ("end", None)]


def test_a_job_that_never_began_or_is_deleted_has_nothing_to_wait_for(http: httpx2.Client, job: str) -> None:
    with http.stream("GET", f"/v1/jobs/{job}/logs/stream") as response:
        http.post(f"/v1/jobs/{job}/cancel")
        (end,) = events(response.iter_lines())
    assert (end["event"], end["data"]["status"]) == ("end", "cancelled")
    http.delete(f"/v1/jobs/{job}")
    assert http.get(f"/v1/jobs/{job}/logs").status_code == 404
    assert http.get(f"/v1/jobs/{job}/logs/stream").status_code == 404


@pytest.mark.parametrize(
    "query", ["level=loud", "after=-1", "before=x", "limit=0", "limit=1001", "worker=" + "x" * 101]
)
def test_a_wrong_question_is_a_problem_that_names_it(http: httpx2.Client, job: str, query: str) -> None:
    answer = http.get(f"/v1/jobs/{job}/logs?{query}")
    assert answer.status_code == 422 and query.partition("=")[0] in answer.json()["errors"][0]["field"]
    assert http.get(f"/v1/jobs/{job}/logs/stream?level=loud").status_code == 422


def test_hostile_lines_reach_nobody_as_they_were(
    http: httpx2.Client, client: Client, redis: Redis, job: str, capsys: pytest.CaptureFixture[str]
) -> None:
    put_raw(redis, job, {"text": "\x1b[2J\u202e<script>", "worker": "\x07", "level": "\x00", "data": {"\x1b": "\x9b"}})
    with http.stream("GET", f"/v1/jobs/{job}/logs/stream") as response:
        (line,) = follow(response.iter_lines(), 1)
    assert line["data"]["text"] == "\ufffd[2J\ufffd<script>" and line["data"]["data"] == {"\ufffd": "\ufffd"}
    assert run(app, ["jobs", "logs", job]) == 0
    assert [c for c in capsys.readouterr().out if not c.isprintable() and c != "\n"] == []


def test_the_command_line_reads_and_follows_the_real_thing(
    http: httpx2.Client, client: Client, redis: Redis, job: str, capsys: pytest.CaptureFixture[str]
) -> None:
    put(redis, job, "one", "two", level="warning")
    with http.stream("GET", f"/v1/jobs/{job}/logs/stream") as response:
        follow(response.iter_lines(), 2)  # they are stored
    http.post(f"/v1/jobs/{job}/cancel")
    assert run(app, ["jobs", "logs", job, "-f", "--limit", "1", "--json"]) == 0
    assert [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()] == ["two"]
    assert [line["text"] for line in client.logs(job, "studio", "warning", None)] == ["one", "two"]
    assert list(client.follow_logs(job, level="error")) == []
