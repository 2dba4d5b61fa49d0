"""The REST client against servers that misbehave."""

import hashlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from computeshare.client import Client, NoServer
from computeshare.client.api.models import Problem
from computeshare.errors import ArtifactError, ComputeShareError, SettingsError
from tests.support.http_answers import Answer, FakeServer, event, job, stream

TENSOR = np.arange(1000, dtype=np.float32)
WEIGHTS = save({"w": TENSOR}, {"order": '["w"]'})
SHA256 = hashlib.sha256(TENSOR.tobytes()).hexdigest()


@pytest.fixture
def client(server: FakeServer) -> Iterator[Client]:
    with Client(server.url, "secret", timeout_s=5) as found:
        yield found


def test_the_token_travels_as_bearer_and_the_body_as_json(server: FakeServer, client: Client) -> None:
    server.on("POST /v1/jobs", Answer(job(), 201))
    assert client.create({"dataset": "digits"}, "my-key")["id"] == "ab12cd34"
    (request,) = server.requests
    assert request.headers["Authorization"] == "Bearer secret"
    assert request.headers["Idempotency-Key"] == "my-key"
    assert json.loads(request.body) == {"dataset": "digits"}


def test_a_creation_whose_answer_is_lost_is_repeated_with_its_key(server: FakeServer, client: Client) -> None:
    server.on("POST /v1/jobs", Answer(hang_up=True), Answer(job(), 201))
    client.create({"dataset": "digits"})
    first, second = (request.headers["Idempotency-Key"] for request in server.requests)
    assert first == second


@pytest.mark.parametrize("verb", ["pause", "resume", "retry", "cancel"])
def test_a_change_is_not_repeated_behind_the_users_back(server: FakeServer, client: Client, verb: str) -> None:
    server.on(f"POST /v1/jobs/ab12cd34/{verb}", Answer(hang_up=True))
    with pytest.raises(NoServer, match="broke"):
        getattr(client, verb)("ab12cd34")
    assert len(server.requests) == 1


def test_a_list_follows_cursors_and_stops_at_the_limit(server: FakeServer, client: Client) -> None:
    server.on("GET /v1/jobs?status=running&status=queued&limit=100", Answer(page(["a", "b"], ">x&y")))
    server.on("GET /v1/jobs?status=running&status=queued&limit=100&cursor=%3Ex%26y", Answer(page(["c", "d"], None)))
    assert [j["id"] for j in client.jobs(["running", "queued"])] == ["a", "b", "c", "d"]
    server.on("GET /v1/jobs?limit=2", Answer(page(["a", "b"], "more")))
    assert [j["id"] for j in client.jobs(limit=2)] == ["a", "b"]
    assert not any("more" in request.path for request in server.requests)


def page(ids: list[str], cursor: str | None) -> object:
    return {"items": [job(id=each) for each in ids], "next_cursor": cursor}


def test_a_problem_names_its_fields(server: FakeServer, client: Client) -> None:
    errors = [
        {"in": "body", "field": "optimizer.lr", "pointer": "/optimizer/lr", "detail": "must not be negative"},
        {"in": "body", "field": "", "pointer": "", "detail": "give rounds or epochs, not both"},
    ]
    server.on("POST /v1/jobs", Answer({"title": "t", "detail": "d", "errors": errors}, 422))
    with pytest.raises(Problem) as caught:
        client.create({})
    assert caught.value.status == 422
    assert caught.value.detail == "d"
    assert caught.value.errors == (
        ("optimizer.lr", "must not be negative"),
        ("", "give rounds or epochs, not both"),
    )
    assert str(caught.value) == "optimizer.lr: must not be negative\ngive rounds or epochs, not both"


@pytest.mark.parametrize(
    ("answer", "status", "message"),
    [
        (Answer({"title": "Not found", "detail": "there is no job x"}, 404), 404, "there is no job x"),
        (Answer({"detail": "Not logged in"}, 401), 401, "set COMPUTESHARE_TOKEN"),
        (Answer(b"<h1>Bad gateway</h1>", 502), 502, "502 Bad Gateway"),
        (Answer(b"[1]", 500), 500, "500 Internal Server Error"),
        (Answer({"errors": ["x", {}], "detail": None}, 400), 400, "is wrong"),
        (Answer(b"", 307, {"Location": "https://elsewhere"}), 307, "redirects to https://elsewhere"),
        (Answer(b"<html>a router's login page</html>"), 502, "check COMPUTESHARE_URL"),
        (Answer(b"[]"), 502, "check COMPUTESHARE_URL"),
    ],
)
def test_any_refusal_becomes_a_problem_with_its_status(
    server: FakeServer, client: Client, answer: Answer, status: int, message: str
) -> None:
    server.on("GET /v1/jobs/x", answer)
    with pytest.raises(Problem, match=message) as caught:
        client.show("x")
    assert caught.value.status == status


def test_a_list_without_items_is_no_control_planes(server: FakeServer, client: Client) -> None:
    server.on("GET /v1/jobs?limit=100", Answer({"hello": "world"}))
    with pytest.raises(Problem, match="check COMPUTESHARE_URL"):
        list(client.jobs())


def test_nobody_listening_says_what_to_start() -> None:
    with socket.socket() as taken:  # bound and not listening: refused, and nobody else gets the port
        taken.bind(("127.0.0.1", 0))
        client = Client(f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(NoServer, match="start `computeshare up` there, or set COMPUTESHARE_URL"):
            client.show("x")


def test_a_server_that_never_answers_is_not_waited_for_long() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = Client(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.1)
        with pytest.raises(NoServer, match="did not answer in time"):
            client.show("x")


def test_loopback_is_reached_past_a_proxy_of_the_environment(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    server.on("GET /v1/jobs/x", Answer(job()))
    assert Client(server.url).show("x")["id"] == "ab12cd34"


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://host", "http://", "http://host:99999", "file:///etc"])
def test_what_is_no_address_is_refused_before_it_is_used(url: str) -> None:
    with pytest.raises(SettingsError, match="http://HOST:PORT"):
        Client(url)


@pytest.mark.parametrize("token", ["a\nb", "é"])
def test_a_token_that_cannot_be_one_is_refused_without_being_shown(token: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Client("http://127.0.0.1:1", token)
    assert token not in str(caught.value)


def test_a_job_id_cannot_leave_its_place_in_the_path(server: FakeServer, client: Client) -> None:
    with pytest.raises(Problem):
        client.show("a/../../readyz?x#y")
    assert server.requests[0].path == "/v1/jobs/a%2F..%2F..%2Freadyz%3Fx%23y"


def test_following_goes_on_where_a_lost_stream_broke_off(server: FakeServer, client: Client) -> None:
    server.on(
        "GET /v1/jobs/ab12cd34/events",
        stream(event("job", job()), event("version", {"version": 26}, 8)),
        Answer({"detail": "starting"}, 503),
        Answer(hang_up=True),
        stream(event("job", job()), event("scored", {}, 9), event("job", job(status="completed"))),
    )
    events = list(client.follow(job()))
    assert [e.type for e in events] == ["job", "version", "lost", "lost", "lost", "job", "scored", "job"]
    assert [e.id for e in events if e.type in ("version", "scored")] == [8, 9]
    asked = [request.headers["Last-Event-ID"] for request in server.asked("GET /v1/jobs/ab12cd34/events")]
    assert asked == ["7", "8", "8", "8"]


def test_following_a_job_that_was_deleted_ends_with_the_problem(server: FakeServer, client: Client) -> None:
    server.on("GET /v1/jobs/ab12cd34/events", stream(event("job", job())), Answer({"detail": "there is no job"}, 404))
    with pytest.raises(Problem, match="there is no job"):
        list(client.follow(job()))


def test_following_an_ended_job_asks_for_nothing(server: FakeServer, client: Client) -> None:
    assert list(client.follow(job(status="failed"))) == []
    assert server.requests == []


def test_a_download_arrives_whole_with_its_digest_and_tells_its_progress(
    server: FakeServer, client: Client, tmp_path: Path
) -> None:
    server.on("GET /v1/jobs/x/checkpoints/7", Answer(WEIGHTS, headers={"ETag": f'"{SHA256}"'}))
    told: list[tuple[int, int | None]] = []
    path = tmp_path / "w.safetensors"
    assert client.download("x", 7, path, lambda done, total: told.append((done, total))) == SHA256
    assert path.read_bytes() == WEIGHTS
    assert told[-1] == (len(WEIGHTS), len(WEIGHTS))


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (Answer(WEIGHTS[:2000], promised=len(WEIGHTS)), NoServer, "broke"),
        (Answer(WEIGHTS[:-4]), ArtifactError, "not a complete weights file"),
        (Answer(WEIGHTS, headers={"ETag": '"0123"'}), ArtifactError, "not those the control plane announced"),
        (Answer(b"<html>"), ArtifactError, "not a complete weights file"),
        (Answer({"detail": "there is no job"}, 404), Problem, "there is no job"),
    ],
)
def test_a_download_that_fails_leaves_what_was_there_and_nothing_else(
    server: FakeServer, client: Client, tmp_path: Path, answer: Answer, error: type[ComputeShareError], message: str
) -> None:
    server.on("GET /v1/jobs/x/checkpoints/7", answer)
    path = tmp_path / "w.safetensors"
    path.write_bytes(b"before")
    with pytest.raises(error, match=message):
        client.download("x", 7, path)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_download_interrupted_by_its_reader_leaves_nothing(
    server: FakeServer, client: Client, tmp_path: Path
) -> None:
    def interrupt(done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    server.on("GET /v1/jobs/x/checkpoints/7", Answer(WEIGHTS))
    with pytest.raises(KeyboardInterrupt):
        client.download("x", 7, tmp_path / "w.safetensors", interrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_download_into_a_folder_that_is_not_there_says_so(server: FakeServer, client: Client, tmp_path: Path) -> None:
    server.on("GET /v1/jobs/x/checkpoints/7", Answer(WEIGHTS))
    with pytest.raises(ArtifactError, match=r"cannot write .*: No such file or directory"):
        client.download("x", 7, tmp_path / "none" / "w.safetensors")


def test_versions_are_fetched_page_by_page_up_to_the_last_one_asked_for(server: FakeServer, client: Client) -> None:
    def some(first: int, last: int, following: int | None) -> Answer:
        items = [{"version": version, "sha256": None, "counted": []} for version in range(first, last + 1)]
        return Answer({"items": items, "next_since": following})

    server.on("GET /v1/jobs/ab12cd34/versions?since=4&limit=100", some(5, 104, 104))
    server.on("GET /v1/jobs/ab12cd34/versions?since=104&limit=6", some(105, 110, 110))
    assert [one["version"] for one in client.versions("ab12cd34", 5, 110)] == [*range(5, 111)]


def test_a_fork_whose_answer_is_lost_is_repeated_with_its_key(server: FakeServer, client: Client) -> None:
    server.on("POST /v1/jobs/ab12cd34/fork", Answer(hang_up=True), Answer(job(), 201))
    client.fork("ab12cd34", "best")
    first, second = (request.headers["Idempotency-Key"] for request in server.requests)
    assert first == second
