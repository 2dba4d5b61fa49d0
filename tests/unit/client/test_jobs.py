"""`ComputeShare` and its jobs against servers that behave and that do not."""

import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from computeshare.client import ArtifactError, ComputeShare, JobFailed, NoServer, Problem, SettingsError
from computeshare.client.api.models import Checkpoint
from computeshare.client.card import card
from computeshare.client.event_thread import Follower
from computeshare.client.metrics import Metrics
from computeshare.client.weights import WeightsCache
from computeshare.settings import RunFile
from tests.support.http_answers import Answer, FakeServer, cut, event, job, stream

SHOW, EVENTS = "GET /v1/jobs/ab12cd34", "GET /v1/jobs/ab12cd34/events"


@pytest.fixture
def cs(server: FakeServer, tmp_path: Path) -> Iterator[ComputeShare]:
    with ComputeShare(server.url, "secret", timeout_s=5, cache=tmp_path / "cache") as found:
        yield found


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty home, and no variable of ours."""
    for name in [name for name in os.environ if name.startswith("COMPUTESHARE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COMPUTESHARE_HOME", str(tmp_path))
    return tmp_path


def test_importing_the_package_imports_next_to_nothing_and_the_client_no_torch() -> None:
    program = (
        "import sys, computeshare\n"
        "assert 'computeshare.client' not in sys.modules and 'httpx2' not in sys.modules\n"
        "from computeshare import ComputeShare\n"
        "from computeshare.client import ComputeShare as same\n"
        "assert ComputeShare is same and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    with pytest.raises(ImportError, match="NoSuchThing"):
        exec("from computeshare import NoSuchThing", {})


def test_without_arguments_it_finds_the_control_plane_that_runs_here(server: FakeServer, bare: Path) -> None:
    server.on(SHOW, Answer(job()))
    RunFile(url=server.url, redis_url="redis://h").write(bare / "run.json")
    (bare / "token").write_text("of this home\n")
    with ComputeShare() as cs:
        assert cs.jobs.get("ab12cd34").version == 25
    assert server.requests[0].headers["Authorization"] == "Bearer of this home"


def test_the_variables_win_over_the_home_and_arguments_over_both(
    server: FakeServer, bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RunFile(url="http://127.0.0.1:9", redis_url="redis://h").write(bare / "run.json")
    monkeypatch.setenv("COMPUTESHARE_URL", "http://127.0.0.1:10")
    monkeypatch.setenv("COMPUTESHARE_TOKEN", "variable")
    assert ComputeShare().url == "http://127.0.0.1:10"
    server.on(SHOW, Answer(job()))
    ComputeShare(server.url, "argument").jobs.get("ab12cd34")
    assert server.requests[0].headers["Authorization"] == "Bearer argument"


def test_where_no_control_plane_is_known_it_says_what_to_start(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoServer, match="Start one: `computeshare up`, or set COMPUTESHARE_URL"):
        ComputeShare()
    with pytest.raises(SettingsError, match="http://HOST:PORT"):
        ComputeShare("nonsense")
    monkeypatch.setenv("COMPUTESHARE_APPENDONLY", "perhaps")
    with pytest.raises(SettingsError, match="COMPUTESHARE_APPENDONLY: must be true or false"):
        ComputeShare()


def test_a_job_is_made_from_fields_from_a_document_and_from_both(server: FakeServer, cs: ComputeShare) -> None:
    server.on("POST /v1/jobs", Answer(job(), 201))
    spec = {"dataset": "digits", "model": "mlp", "seed": 1}
    assert cs.jobs.create(dataset="digits", model="mlp").id == "ab12cd34"
    cs.jobs.create(spec, seed=2, idempotency_key="once")
    assert [json.loads(request.body) for request in server.requests] == [
        {"dataset": "digits", "model": "mlp"},
        {"dataset": "digits", "model": "mlp", "seed": 2},
    ]
    assert server.requests[1].headers["Idempotency-Key"] == "once"
    assert spec["seed"] == 1


def test_a_wrong_field_is_named(server: FakeServer, cs: ComputeShare) -> None:
    server.on("POST /v1/jobs", Answer({"errors": [{"field": "model", "detail": "unknown; allowed: mlp"}]}, 422))
    with pytest.raises(Problem, match="model: unknown; allowed: mlp"):
        cs.jobs.create(dataset="digits", model="x")


def test_a_job_is_a_typed_snapshot_until_it_is_refreshed(server: FakeServer, cs: ComputeShare) -> None:
    server.on(SHOW, Answer(job()), Answer(job(version=30, finished_at="2026-01-01T13:00:00Z")))
    found = cs.jobs.get("ab12cd34")
    assert (found.id, found.status, found.version, found.accuracy) == ("ab12cd34", "running", 25, 0.75)
    assert found.created_at == datetime(2026, 1, 1, 12, tzinfo=UTC)
    assert found.finished_at is None and not found.ended
    assert found.url == f"{server.url}/jobs/ab12cd34"
    assert repr(found) == "<Job ab12cd34 running 25/100>"
    assert found.refresh() is found
    assert found.version == 30 and found.finished_at == datetime(2026, 1, 1, 13, tzinfo=UTC)


def test_a_list_has_filters_a_length_and_a_table(server: FakeServer, cs: ComputeShare) -> None:
    page = {"items": [job(id="a"), job(id="b", name="<b>", title="<b>")], "next_cursor": None}
    server.on("GET /v1/jobs?status=running&queue=q&limit=5", Answer(page))
    server.on("GET /v1/jobs?status=failed&status=cancelled&limit=100", Answer({"items": [], "next_cursor": None}))
    found = cs.jobs.list("running", "q", 5)
    assert [one.id for one in found] == ["a", "b"] and len(found) == 2 and found[1].id == "b"
    html = found._repr_html_()
    assert f'href="{server.url}/jobs/a"' in html and "&lt;b&gt;" in html and "<b>" not in html
    assert len(cs.jobs.list(["failed", "cancelled"], limit=None)) == 0


def test_waiting_ends_with_the_job_and_brings_it_up_to_date(server: FakeServer, cs: ComputeShare) -> None:
    ended = job(status="completed", version=100, accuracy=0.9)
    server.on(SHOW, Answer(job()), Answer(job()), Answer({"detail": "away again"}, 503))
    server.on(EVENTS, stream(event("job", job(version=60))), stream(event("job", ended)))
    found = cs.jobs.get("ab12cd34")
    assert found.wait(30) is found
    assert (found.status, found.version, found.accuracy) == ("completed", 100, 0.9)
    assert [request.headers.get("Last-Event-ID") for request in server.asked(EVENTS)] == ["7", "7"]


@pytest.mark.parametrize(
    ("status", "told", "message"),
    [
        ("failed", {"error": "diverged at version 3"}, "job ab12cd34 failed: diverged at version 3"),
        ("cancelled", {}, "job ab12cd34 was cancelled"),
    ],
)
def test_waiting_for_a_job_that_fails_raises_why(
    server: FakeServer, cs: ComputeShare, status: str, told: dict[str, Any], message: str
) -> None:
    server.on(SHOW, Answer(job(status=status, **told)))
    with pytest.raises(JobFailed) as caught:
        cs.jobs.get("ab12cd34").wait()
    assert str(caught.value) == message
    assert (caught.value.job_id, caught.value.status) == ("ab12cd34", status)


def test_waiting_is_given_up_after_the_time_allowed_though_the_stream_is_silent(
    server: FakeServer, cs: ComputeShare
) -> None:
    over = threading.Event()
    server.on(SHOW, Answer(job(status="queued", reason="Needs 1 worker")))
    server.on(EVENTS, stream(until=over))
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="still queued: Needs 1 worker"):
        cs.jobs.get("ab12cd34").wait(0.3)
    assert 0.3 <= time.monotonic() - started < 5
    over.set()


@pytest.mark.slow
def test_whoever_stops_waiting_lets_go_of_connection_and_thread(server: FakeServer, cs: ComputeShare) -> None:
    over, waits = threading.Event(), 120  # more than a client has connections
    server.on(SHOW, Answer(job()))
    server.on(EVENTS, stream(event("version", {"version": 26}, 8), until=over))
    found = cs.jobs.get("ab12cd34")
    for _ in range(waits):
        with Follower(cs.client, found.document) as follower:
            first = follower.next(20)
            assert first not in (None, "end")
    with pytest.raises(TimeoutError):
        found.wait(0.1)
    deadline = time.monotonic() + 20
    while server.open_streams or any(thread.name == "events" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, f"{server.open_streams} streams are open"
        time.sleep(0.01)
    assert len(server.asked(EVENTS)) >= waits and not over.is_set()


def test_waiting_outlives_an_outage_and_not_a_refusal(server: FakeServer, cs: ComputeShare) -> None:
    ended = job(status="completed")
    server.on(SHOW, Answer(job()))
    server.on(EVENTS, Answer(hang_up=True), Answer({"detail": "starting"}, 503), stream(event("job", ended)))
    assert cs.jobs.get("ab12cd34").wait(30).status == "completed"
    server.on(SHOW, Answer(job()))
    server.on(EVENTS, Answer({"detail": "there is no job ab12cd34"}, 404))
    with pytest.raises(Problem, match="there is no job"):
        cs.jobs.get("ab12cd34").wait(30)


def test_events_go_on_where_they_broke_off_and_bring_the_job_up_to_date(server: FakeServer, cs: ComputeShare) -> None:
    server.on(SHOW, Answer(job()))
    first = stream(event("joined", {"worker": "w1"}, 8), event("job", job(version=40)))
    second = stream(event("version", {"version": 41}, 9), event("job", job(status="completed", version=100)))
    server.on(EVENTS, first, second)
    found = cs.jobs.get("ab12cd34")
    seen = [(one.type, one.id, found.version) for one in found.events()]
    assert seen == [("joined", 8, 25), ("job", 8, 40), ("lost", 8, 40), ("version", 9, 40), ("job", 9, 100)]
    assert [request.headers["Last-Event-ID"] for request in server.asked(EVENTS)] == ["7", "8"]


def test_the_whole_timeline_of_a_job_that_has_ended_can_be_read(server: FakeServer, cs: ComputeShare) -> None:
    ended = job(status="completed")
    server.on(SHOW, Answer(ended))
    server.on(EVENTS, stream(event("created", {}, 1), event("completed", {}, 2), event("job", ended)))
    found = cs.jobs.get("ab12cd34")
    assert [one.type for one in found.events(after=0)] == ["created", "completed", "job"]
    assert list(found.events()) == []
    assert server.asked(EVENTS)[0].headers["Last-Event-ID"] == "0"


def test_a_timeline_that_is_cut_behind_the_jobs_end_goes_on(server: FakeServer, cs: ComputeShare) -> None:
    ended = job(status="completed")
    server.on(SHOW, Answer(ended))
    first = cut(event("job", ended), event("created", {}, 1))
    server.on(EVENTS, first, Answer(hang_up=True), stream(event("job", ended), event("completed", {}, 2)))
    seen = [one.type for one in cs.jobs.get("ab12cd34").events(after=0)]
    assert seen == ["job", "created", "lost", "lost", "job", "completed"]
    assert [request.headers["Last-Event-ID"] for request in server.asked(EVENTS)] == ["0", "1", "1"]


def test_metrics_are_typed_and_make_a_table() -> None:
    at = "2026-01-01T12:00:00Z"
    document = {
        "train_loss": [{"version": 1, "value": 2.0, "at": at}, {"version": 2, "value": 1.0, "at": at}],
        "test_accuracy": [{"version": 2, "value": 0.5, "at": at}],
        "staleness": [{"version": 2, "value": 1.5, "at": at}],
        "own_metrics": {"f1": [{"version": 2, "value": 0.25, "at": at}]},
        "of_a_newer_release": [{"version": 1}],
    }
    found = Metrics.of(document)
    assert found.own_metrics["f1"][0].value == 0.25 and found.rows()[-1]["own_metrics.f1"] == 0.25
    assert found.train_loss[1].value == 1.0 and found.train_loss[1].at == datetime(2026, 1, 1, 12, tzinfo=UTC)
    assert found.to_dict()["test_accuracy"] == {2: 0.5} and found.to_dict()["test_loss"] == {}
    assert found.staleness[0].value == 1.5
    rows = found.rows()
    assert [(row["version"], row["train_loss"], row["test_accuracy"]) for row in rows] == [
        (1, 2.0, None),
        (2, 1.0, 0.5),
    ]
    assert {frozenset(row) for row in rows} == {frozenset(["version", "at", *found.to_dict()])}


@pytest.mark.parametrize("verb", ["pause", "resume", "cancel", "retry"])
def test_a_change_brings_the_job_up_to_date(server: FakeServer, cs: ComputeShare, verb: str) -> None:
    server.on(SHOW, Answer(job()))
    server.on(f"POST /v1/jobs/ab12cd34/{verb}", Answer(job(status="paused"), 202))
    found = cs.jobs.get("ab12cd34")
    assert getattr(found, verb)() is found and found.status == "paused"


def test_jobs_are_found_sorted_and_renamed(server: FakeServer, cs: ComputeShare) -> None:
    page = {"items": [job()], "next_cursor": None}
    server.on("GET /v1/jobs?search=mnist&sort=accuracy&limit=50", Answer(page))
    server.on("PATCH /v1/jobs/ab12cd34", Answer(job(name="better", title="better")))
    (found,) = cs.jobs.list(search="mnist", sort="accuracy")
    assert found.rename("better") is found and found.title == "better"
    assert json.loads(server.requests[-1].body) == {"name": "better"}


def test_another_priority_is_told_and_shown(server: FakeServer, cs: ComputeShare) -> None:
    server.on(SHOW, Answer(job(priority=0)))
    server.on("PATCH /v1/jobs/ab12cd34", Answer(job(priority=10)))
    found = cs.jobs.get("ab12cd34")
    assert found.priority == 0 and found.prioritise(10) is found and found.priority == 10
    assert json.loads(server.requests[-1].body) == {"priority": 10}


def test_logs_are_the_newest_lines_and_those_that_come_if_wanted(server: FakeServer, cs: ComputeShare) -> None:
    page = {"items": [line(4), line(5)], "previous": 3}
    live = "GET /v1/jobs/ab12cd34/logs/stream?worker=w1&level=warning"
    server.on(SHOW, Answer(job()))
    server.on("GET /v1/jobs/ab12cd34/logs?worker=w1&level=warning&limit=2", Answer(page))
    server.on(live, stream(event("line", line(6), 6)), stream(event("line", line(7), 7), event("end", {})))
    found = cs.jobs.get("ab12cd34")
    assert [one["id"] for one in found.logs(2, "w1", "warning")] == [4, 5]
    assert server.asked(live) == []
    assert [one["id"] for one in found.logs(2, "w1", "warning", follow=True)] == [4, 5, 6, 7]
    assert [request.headers["Last-Event-ID"] for request in server.asked(live)] == ["5", "6"]


def line(number: int) -> dict[str, Any]:
    about = {"at": "2026-01-01T12:00:00Z", "worker": "w1", "name": "mac", "level": "warning"}
    return {"id": number, **about, "text": f"line {number}", "data": {}}


def test_a_fork_is_another_job(server: FakeServer, cs: ComputeShare) -> None:
    server.on(SHOW, Answer(job()))
    server.on("POST /v1/jobs/ab12cd34/fork", Answer(job(id="new"), 201))
    assert cs.jobs.get("ab12cd34").fork("best", optimizer="fresh", epochs=2).id == "new"
    assert json.loads(server.requests[-1].body) == {"version": "best", "spec": {"epochs": 2}, "optimizer": "fresh"}


def test_submissions_come_page_by_page_as_far_as_they_are_wanted(server: FakeServer, cs: ComputeShare) -> None:
    path = "GET /v1/jobs/ab12cd34/submissions?outcome=stale&limit=100"
    server.on(SHOW, Answer(job()))
    server.on(path, Answer({"items": [{"id": 2}], "next_cursor": "c"}))
    server.on(f"{path}&cursor=c", Answer({"items": [{"id": 1}], "next_cursor": None}))
    found = cs.jobs.get("ab12cd34")
    assert [one["id"] for one in found.submissions(None, "stale")] == [2, 1]
    assert len(server.asked(f"{path}&cursor=c")) == 1


HOSTILE = '"><script>alert(1)</script>'


def test_a_card_escapes_whatever_it_shows() -> None:
    shown = job(id=HOSTILE, title=HOSTILE, status="failed", error=f"boom {HOSTILE}", reason=HOSTILE)
    html = card(shown, f"http://h/jobs/{HOSTILE}")
    assert "<script" not in html and html.count("&lt;script&gt;") == 4
    assert html.count("<div") == html.count("</div>")


def test_a_card_tells_state_progress_and_accuracy_and_leaves_the_colour_of_text_to_the_notebook() -> None:
    html = card(job(), "http://h/jobs/ab12cd34")
    for part in ("▶ running", "version 25 of 100", "accuracy 75.00 %", "width:25.0%", 'href="http://h/jobs/ab12cd34"'):
        assert part in html
    assert set(re.findall(r'[";]color:([^;"]*)', html)) == {"inherit"}
    long = card(job(error="x" * 5000), "http://h")
    assert "x" * 600 + " …" in long and "x" * 601 not in long
    assert "width:100.0%" in card(job(version=900, rounds_total=0), "http://h")


def weights(value: int, size: int = 1000) -> tuple[bytes, str]:
    tensor = np.full(size, value, np.float32)
    return save({"w": tensor}, {"order": '["w"]'}), hashlib.sha256(tensor.tobytes()).hexdigest()


def offer(server: FakeServer, version: int, body: bytes, sha256: str) -> Checkpoint:
    server.on(f"GET /v1/jobs/x/checkpoints/{version}", Answer(body, headers={"ETag": f'"{sha256}"'}))
    return {"version": version, "sha256": sha256, "bytes": len(body), "accuracy": None, "best": False}


def test_weights_are_downloaded_once_and_again_where_the_file_was_damaged(
    server: FakeServer, cs: ComputeShare, tmp_path: Path
) -> None:
    cache, (body, sha256) = WeightsCache(tmp_path / "c", 10**6), weights(1)
    checkpoint = offer(server, 1, body, sha256)
    path = cache.fetch(cs.client, "x", checkpoint)
    assert path == tmp_path / "c" / f"{sha256}.safetensors" and path.read_bytes() == body
    assert cache.fetch(cs.client, "x", checkpoint) == path and len(server.requests) == 1
    path.write_bytes(body[:-4] + b"\xff\xff\xff\xff")
    assert cache.fetch(cs.client, "x", checkpoint).read_bytes() == body and len(server.requests) == 2


def test_weights_other_than_announced_are_not_handed_out(server: FakeServer, cs: ComputeShare, tmp_path: Path) -> None:
    cache, (body, sha256), (_, other) = WeightsCache(tmp_path / "c", 10**6), weights(1), weights(2)
    with pytest.raises(ArtifactError, match="has changed: try again"):
        cache.fetch(cs.client, "x", {**offer(server, 1, body, sha256), "sha256": other})
    with pytest.raises(ArtifactError, match="names no sha256"):
        cache.fetch(cs.client, "x", {**offer(server, 1, body, sha256), "sha256": "../../etc/passwd"})
    assert list((tmp_path / "c").iterdir()) == []


def test_the_cache_drops_what_was_not_used_for_longest(server: FakeServer, cs: ComputeShare, tmp_path: Path) -> None:
    cache = WeightsCache(tmp_path, 10_000)  # room for two
    paths = []
    for version in (1, 2, 3):
        checkpoint = offer(server, version, *weights(version))
        paths.append(cache.fetch(cs.client, "x", checkpoint))
        os.utime(paths[-1], (version, version))
        if version == 2:
            os.utime(paths[0], (9, 9))  # used since
    assert [path.exists() for path in paths] == [True, False, True]
    large = cache.fetch(cs.client, "x", offer(server, 4, *weights(4, 5000)))
    assert list(tmp_path.iterdir()) == [large]


def test_a_cache_that_cannot_be_made_names_the_way_out(server: FakeServer, cs: ComputeShare, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match=r"ComputeShare\(cache=\.\.\.\)"):
        WeightsCache(tmp_path / "file" / "c", 1).fetch(cs.client, "x", offer(server, 1, *weights(1)))


def test_nobody_listening_is_told_by_every_call(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        cs = ComputeShare(f"http://127.0.0.1:{taken.getsockname()[1]}", "t")
        for call in (lambda: cs.jobs.get("x"), cs.jobs.list, lambda: cs.jobs.create(dataset="d", model="m")):
            with pytest.raises(NoServer, match="start `computeshare up` there"):
                call()
