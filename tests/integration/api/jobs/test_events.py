"""The stream of a job's events, from a real server."""

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
import uvicorn
from redis import Redis
from starlette.testclient import TestClient

from api.deps import Services
from api.jobs import event_feeds
from api.main import create_app
from computeshare.jobspec.spec import JobSpec
from computeshare.settings import Settings
from tests.support.event_stream import Feed
from tests.support.sse import events
from tests.support.wait import wait_until

SPEC: dict[str, Any] = {"dataset": "digits", "model": "mlp", "rounds": 2}


class Server:
    """The control plane behind uvicorn, in a thread."""

    def __init__(self, settings: Settings) -> None:
        self.app = create_app(settings)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        config = uvicorn.Config(self.app, port=self.port, log_level="warning", timeout_graceful_shutdown=3)
        self.server = uvicorn.Server(config)
        self.services: Services = self.app.state.services
        self.services.stopping = lambda: self.server.should_exit
        self.thread = threading.Thread(target=self.server.run)

    def start(self) -> httpx2.Client:
        self.thread.start()
        wait_until(lambda: self.server.started)
        headers = {"Authorization": "Bearer secret"}
        return httpx2.Client(base_url=f"http://127.0.0.1:{self.port}", headers=headers, timeout=10)

    def stop(self) -> float:
        """Stop, and say how long that took."""
        started = time.monotonic()
        self.server.should_exit = True
        self.thread.join()
        return time.monotonic() - started


@pytest.fixture
def server(settings: Settings) -> Iterator[Server]:
    server = Server(settings)
    yield server
    server.stop()


@pytest.fixture
def http(server: Server) -> Iterator[httpx2.Client]:
    with server.start() as http:
        yield http


@pytest.fixture
def job(http: httpx2.Client) -> str:
    return str(http.post("/v1/jobs", json=SPEC).json()["id"])


@pytest.fixture
def feed(redis: Redis, job: str) -> Feed:
    return Feed(redis, job, JobSpec(**SPEC).plan)


def whole(feed: Feed) -> None:
    """A job from its first worker to its score."""
    feed.open()
    feed.join()
    feed.commit()
    feed.commit()
    feed.save()
    feed.score()


def test_stream_begins_with_the_job_and_ends_with_it(http: httpx2.Client, feed: Feed, job: str) -> None:
    with http.stream("GET", f"/v1/jobs/{job}/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        stream = events(response.iter_lines())
        first = next(stream)
        assert (first["event"], first["data"]["id"], first["data"]["status"]) == ("job", job, "queued")
        assert "id" not in first
        whole(feed)
        rest = list(stream)
    kinds = [e["event"] for e in rest if e["event"] != "job"]
    assert kinds == ["created", "opened", "joined", "version", "version", "checkpoint", "scored", "completed"]
    assert [e for e in rest if e["event"] == "job"][-1]["data"]["status"] == "completed"
    version = next(e for e in rest if e["event"] == "version")["data"]
    assert version["data"] | {"samples": 128} == version["data"] and version["data"]["version"] == 1


def test_stream_goes_on_after_the_last_event_a_client_saw(http: httpx2.Client, feed: Feed, job: str) -> None:
    whole(feed)
    with http.stream("GET", f"/v1/jobs/{job}/events") as response:
        full = [e for e in events(response.iter_lines()) if e["event"] != "job"]
    seen = full[3]["id"]
    for headers, query in (({"Last-Event-ID": seen}, ""), ({}, f"?after={seen}")):
        with http.stream("GET", f"/v1/jobs/{job}/events{query}", headers=headers) as response:
            rest = [e for e in events(response.iter_lines()) if e["event"] != "job"]
        assert rest == full[4:]
    ids = [int(e["id"]) for e in full]
    assert ids == sorted(set(ids))


def test_last_event_id_of_the_job_leads_to_what_comes_next(http: httpx2.Client, feed: Feed, job: str) -> None:
    last = http.get(f"/v1/jobs/{job}").json()["last_event_id"]
    with http.stream("GET", f"/v1/jobs/{job}/events?after={last}") as response:
        stream = events(response.iter_lines())
        assert next(stream)["event"] == "job"
        feed.send("reducer", host="mac", pid=5, fence=1)
        following = next(e for e in stream if e["event"] != "job")
        assert following["data"]["data"] == {"host": "mac", "pid": 5}


def test_snapshots_are_coalesced(http: httpx2.Client, feed: Feed, job: str) -> None:
    with http.stream("GET", f"/v1/jobs/{job}/events") as response:
        stream = events(response.iter_lines())
        next(stream)
        started, snapshots = time.monotonic(), 0
        for pid in range(1, 400):
            feed.send("reducer", host="mac", pid=pid, fence=1)
        for event in stream:
            snapshots += event["event"] == "job"
            if event["event"] == "reducer" and event["data"]["data"]["pid"] == 399:
                break
        assert snapshots <= 2 + 2 * (time.monotonic() - started)


def test_unknown_job_and_wrong_id_are_problems_before_the_stream_begins(http: httpx2.Client, job: str) -> None:
    assert http.get("/v1/jobs/nope/events").status_code == 404
    for value in ("x", "-1", "1e3", "9" * 30, "1\u00b2"):
        answer = http.get(f"/v1/jobs/{job}/events", headers={"Last-Event-ID": value.encode()})
        assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json")


def test_stream_of_a_job_that_is_deleted_says_so_and_ends(
    http: httpx2.Client, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_feeds, "LOOK_S", 2.0)  # in which the job is both cancelled and deleted
    with http.stream("GET", f"/v1/jobs/{job}/events") as response:
        stream = events(response.iter_lines())
        next(stream)
        http.post(f"/v1/jobs/{job}/cancel")
        http.delete(f"/v1/jobs/{job}")
        *_, last = stream
        assert last == {"event": "deleted", "data": {}}


def test_server_stops_promptly_with_a_stream_open(server: Server, http: httpx2.Client, job: str) -> None:
    with http.stream("GET", f"/v1/jobs/{job}/events") as response:
        lines = response.iter_lines()
        next(lines)
        took_s = server.stop()
        list(lines)  # it ends, it is not cut
    assert took_s < 3


def test_events_survive_a_restart_of_the_control_plane(settings: Settings, redis: Redis) -> None:
    headers = {"Authorization": "Bearer secret"}
    with TestClient(create_app(settings), base_url="http://localhost", headers=headers) as first:
        job = first.post("/v1/jobs", json=SPEC).json()["id"]
    feed = Feed(redis, job, JobSpec(**SPEC).plan)
    whole(feed)  # while nobody reads
    with TestClient(create_app(settings), base_url="http://localhost", headers=headers) as second:
        with second.stream("GET", f"/v1/jobs/{job}/events") as response:
            kinds = [e["event"] for e in events(response.iter_lines()) if e["event"] != "job"]
        assert kinds[-1] == "completed" and kinds.count("version") == 2
        assert second.get(f"/v1/jobs/{job}").json()["accepted"] == 8
