"""The REST contract, over HTTP, with a real broker behind it."""

import csv
import importlib.util
import os
import re
import secrets
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis import Redis
from safetensors.numpy import load
from sqlalchemy import event
from starlette.testclient import TestClient

from api.jobs import series
from api.main import create_app
from api.projection.projector import Projector
from api.system import health
from computeshare import __version__
from computeshare.checkpoints.store import Artifacts
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol.handshake import PROTOCOL
from computeshare.protocol.round_store import RoundStore
from computeshare.queue import WorkerInfo, register
from computeshare.settings import RunFile, Settings, login_path
from computeshare.tasks import class_counts
from computeshare.types import Token
from tests.support.checkpoints import write_checkpoint
from tests.support.event_stream import WORKERS, Feed, token
from tests.support.wait import wait_until

SPEC: dict[str, Any] = {"dataset": "digits", "model": "mlp", "rounds": 30}
PROBLEM = "application/problem+json"


@pytest.fixture
def job(client: TestClient) -> str:
    return str(client.post("/v1/jobs", json=SPEC).json()["id"])


@pytest.fixture
def feed(redis: Redis, job: str) -> Feed:
    return Feed(redis, job, JobSpec(**SPEC).plan)


def project(client: TestClient, redis: Redis) -> None:
    """Take what was fed at once; the background loop may be at it too."""
    Projector(client.app.state.services.database).step(redis)  # type: ignore[attr-defined]


def test_importing_the_api_does_not_import_torch() -> None:
    code = "import sys, api.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_created_job_is_answered_with_its_place_and_defaults(client: TestClient) -> None:
    answer = client.post("/v1/jobs", json={**SPEC, "name": "first"})
    job = answer.json()
    assert answer.status_code == 201
    assert answer.headers["location"] == f"/v1/jobs/{job['id']}"
    assert re.fullmatch("[a-z0-9]{8}", job["id"])
    assert (job["name"], job["status"], job["version"], job["rounds_total"]) == ("first", "queued", 0, 30)
    assert job["spec"]["micro_batch"] == 32 and job["spec"]["optimizer"]["momentum"] == 0.9
    assert client.get(answer.headers["location"]).json()["id"] == job["id"]


CONTRACT = (
    "spec status version rounds_total epoch loss accuracy samples_per_s workers reducer bytes_up bytes_down accepted "
    "stale duplicate durable_version best_version weights_sha256 reason error"
)


def test_job_has_every_field_of_the_contract(client: TestClient, job: str) -> None:
    shown = client.get(f"/v1/jobs/{job}").json()
    assert set(CONTRACT.split()) <= shown.keys()
    assert (shown["workers"], shown["accuracy"], shown["reducer"], shown["durable_version"]) == (0, None, None, 0)


def test_repeated_post_with_the_same_key_makes_one_job(client: TestClient) -> None:
    headers = {"Idempotency-Key": secrets.token_hex(8)}
    first = client.post("/v1/jobs", json=SPEC, headers=headers)
    second = client.post("/v1/jobs", json=dict(reversed(SPEC.items())), headers=headers)
    assert (first.status_code, second.status_code) == (201, 201)
    assert first.json()["id"] == second.json()["id"] and second.headers["location"] == first.headers["location"]
    other = client.post("/v1/jobs", json={**SPEC, "seed": 1}, headers=headers)
    assert other.status_code == 422 and "another request body" in other.json()["detail"]
    assert len(client.get("/v1/jobs").json()["items"]) == 1


def test_key_of_a_deleted_job_makes_no_second_one(client: TestClient) -> None:
    headers = {"Idempotency-Key": "k1"}
    job = client.post("/v1/jobs", json=SPEC, headers=headers).json()["id"]
    client.post(f"/v1/jobs/{job}/cancel")
    assert client.delete(f"/v1/jobs/{job}").status_code == 204
    assert client.post("/v1/jobs", json=SPEC, headers=headers).status_code == 409
    assert client.get("/v1/jobs").json()["items"] == []


def test_list_is_newest_first_filtered_and_paged(client: TestClient) -> None:
    made = [client.post("/v1/jobs", json={**SPEC, "queue": f"q{n % 2}"}).json()["id"] for n in range(7)]
    client.post(f"/v1/jobs/{made[0]}/cancel")
    assert [j["id"] for j in client.get("/v1/jobs").json()["items"]] == made[::-1]
    assert [j["id"] for j in client.get("/v1/jobs?queue=q1").json()["items"]] == made[5::-2]
    assert [j["id"] for j in client.get("/v1/jobs?status=cancelled").json()["items"]] == [made[0]]
    both = client.get("/v1/jobs?status=cancelled&status=queued&limit=100").json()["items"]
    assert len(both) == 7
    found, cursor = [], None
    for _ in range(4):
        page = client.get("/v1/jobs", params={"limit": 2, **({"cursor": cursor} if cursor else {})}).json()
        found += [j["id"] for j in page["items"]]
        cursor = page["next_cursor"]
        client.post("/v1/jobs", json=SPEC)  # what comes while paging neither repeats nor hides anything
    assert found == made[::-1] and cursor is None


def test_cancel_is_answered_at_once_and_only_once(client: TestClient, job: str) -> None:
    answer = client.post(f"/v1/jobs/{job}/cancel")
    assert (answer.status_code, answer.json()["status"]) == (202, "cancelled")
    again = client.post(f"/v1/jobs/{job}/cancel")
    assert (again.status_code, again.headers["content-type"]) == (409, PROBLEM)
    assert "already cancelled" in again.json()["detail"]


def test_only_an_ended_job_can_be_deleted_and_its_files_go_too(client: TestClient, job: str, tmp_path: Path) -> None:
    folder = tmp_path / "artifacts" / job / token(1)
    folder.mkdir(parents=True)
    assert client.delete(f"/v1/jobs/{job}").status_code == 409
    client.post(f"/v1/jobs/{job}/cancel")
    assert client.delete(f"/v1/jobs/{job}").status_code == 204
    assert not folder.parent.exists()
    assert client.get(f"/v1/jobs/{job}").status_code == 404
    assert client.delete(f"/v1/jobs/{job}").status_code == 404


def test_metrics_are_thinned_to_what_was_asked_for(client: TestClient, redis: Redis, feed: Feed, job: str) -> None:
    feed.open()
    for n in range(30):
        feed.commit(loss=float(30 - n), submissions=False)
    project(client, redis)
    full = client.get(f"/v1/jobs/{job}/metrics").json()
    assert [(p["version"], p["value"]) for p in full["train_loss"]] == [(n, 31.0 - n) for n in range(1, 31)]
    assert {"train_loss", "test_loss", "test_accuracy", "samples_per_s"} <= full.keys()
    thin = client.get(f"/v1/jobs/{job}/metrics?points=7").json()["train_loss"]
    assert len(thin) <= 8 and thin[-1]["version"] == 30
    since = client.get(f"/v1/jobs/{job}/metrics?since=28").json()["train_loss"]
    assert [p["version"] for p in since] == [29, 30]
    page = client.get(f"/v1/jobs/{job}/metrics?since=8&until=12&points=4").json()["train_loss"]
    assert [p["version"] for p in page] == [9, 10, 11, 12]
    assert client.get(f"/v1/jobs/{job}/metrics?since=12&until=8").json()["train_loss"] == []
    beyond = client.get(f"/v1/jobs/{job}/metrics?since=28&until=99").json()["train_loss"]
    assert [p["version"] for p in beyond] == [29, 30]


def test_bytes_of_a_version_are_those_since_the_one_before(
    client: TestClient, redis: Redis, feed: Feed, job: str
) -> None:
    feed.open()
    feed.commit()
    feed.commit()
    project(client, redis)
    everything = client.get(f"/v1/jobs/{job}/metrics").json()["bytes_up"]
    assert [(p["version"], p["value"]) for p in everything] == [(1, 4000), (2, 4000)]
    newer = client.get(f"/v1/jobs/{job}/metrics?since=1").json()["bytes_up"]
    assert [(p["version"], p["value"]) for p in newer] == [(2, 4000)]


def test_csv_holds_every_version_however_many_are_read_at_a_time(
    client: TestClient, redis: Redis, feed: Feed, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(series, "CSV_ROWS", 3)
    feed.open()
    for n in range(6):
        feed.commit(loss=float(n))
    feed.score(0.75)
    project(client, redis)
    answer = client.get(f"/v1/jobs/{job}/metrics.csv")
    assert answer.headers["content-type"].startswith("text/csv")
    assert answer.headers["content-disposition"] == f'attachment; filename="{job}.csv"'
    rows = list(csv.DictReader(answer.text.splitlines()))
    assert [(int(row["version"]), float(row["train_loss"])) for row in rows] == [(n + 1, n) for n in range(6)]
    assert {row["bytes_up"] for row in rows} == {"4000"}
    assert [row["test_accuracy"] for row in rows] == [""] * 5 + ["0.75"]
    series_of_json = client.get(f"/v1/jobs/{job}/metrics").json()
    assert datetime.fromisoformat(rows[0]["at"]) == datetime.fromisoformat(series_of_json["train_loss"][0]["at"])
    assert client.get(f"/v1/jobs/{job}").json()["epochs_total"] == 3
    assert client.get("/v1/jobs/nosuchid/metrics.csv").status_code == 404


def test_an_answer_without_content_names_no_type(client: TestClient) -> None:
    job = client.post("/v1/jobs", json=SPEC).json()["id"]
    client.post(f"/v1/jobs/{job}/cancel")
    gone = client.delete(f"/v1/jobs/{job}")
    assert (gone.status_code, gone.content, gone.headers.get("content-type")) == (204, b"", None)
    paths = client.get("/openapi.json").json()["paths"].values()
    empty = [call["responses"]["204"] for path in paths for call in path.values() if "204" in call["responses"]]
    assert len(empty) > 3 and all("content" not in response for response in empty)


def test_staleness_is_told_of_jobs_that_take_late_updates_alone(client: TestClient, redis: Redis, job: str) -> None:
    spec = {"dataset": "digits", "model": "mlp", "strategy": {"kind": "async", "buffer": 4}}
    late = client.post("/v1/jobs", json=spec).json()["id"]
    feed = Feed(redis, late, JobSpec.model_validate(spec).plan)
    feed.open()
    about = {"token": token(1), "version": 1, "base": token(0), "epoch": 0, "loss": 1.0, "sha256": "aa", "seconds": {}}
    feed.send("version", **about, counted=[[0, WORKERS[0], 32], [1, WORKERS[1], 32]], staleness=[0, 3])
    project(client, redis)
    assert [p["value"] for p in client.get(f"/v1/jobs/{late}/metrics").json()["staleness"]] == [1.5]
    assert client.get(f"/v1/jobs/{job}/metrics").json()["staleness"] == []


def test_an_estimate_says_why_there_is_none(client: TestClient, job: str) -> None:
    assert client.get(f"/v1/jobs/{job}/estimate").json() == {
        "low": None,
        "likely": None,
        "high": None,
        "reason": "The job is not running",
    }


def test_submissions_are_filtered_and_paged(client: TestClient, redis: Redis, feed: Feed, job: str) -> None:
    feed.open()
    feed.join(WORKERS[1], name="studio")
    for n in range(5):
        feed.submit(n, WORKERS[n % 2], "accepted" if n < 3 else "stale")
    project(client, redis)

    def numbers(query: str) -> list[int]:
        return [s["micro_batches"][0] for s in client.get(f"/v1/jobs/{job}/submissions?{query}").json()["items"]]

    assert numbers("") == [4, 3, 2, 1, 0]
    assert numbers("outcome=stale") == [4, 3]
    assert numbers(f"worker={WORKERS[0]}") == [4, 2, 0]
    assert numbers(f"worker={WORKERS[0]}&outcome=accepted") == [2, 0]
    assert numbers("worker=studio") == [3, 1]
    first = client.get(f"/v1/jobs/{job}/submissions?limit=3").json()
    second = client.get(f"/v1/jobs/{job}/submissions?limit=3&cursor={first['next_cursor']}").json()
    assert [s["micro_batches"][0] for s in first["items"] + second["items"]] == [4, 3, 2, 1, 0]
    assert second["next_cursor"] is None
    wrong = client.get(f"/v1/jobs/{job}/submissions?outcome=lost")
    assert wrong.status_code == 422 and "'lease_lost'" in wrong.json()["errors"][0]["allowed"]


@pytest.fixture
def checkpoints(client: TestClient, redis: Redis, feed: Feed, job: str, tmp_path: Path) -> dict[int, bytes]:
    """Three versions on disk, the second one the best."""
    feed.open()
    feed.join()
    artifacts, blobs = Artifacts(tmp_path / "artifacts", job), {}
    for version, accuracy in ((1, 0.5), (2, 0.9), (3, 0.7)):
        feed.commit()
        tensors = {"w": np.full(1000, version, np.float32)}
        saved = Token.parse(token(version))
        write_checkpoint(artifacts, saved, tensors, b"state", f"{version:064x}", 0, 4 * version)
        blobs[version] = artifacts.path(saved, "weights.safetensors").read_bytes()
        feed.save()
        feed.score(accuracy)
    project(client, redis)
    return blobs


def test_checkpoints_are_listed_and_downloaded(client: TestClient, job: str, checkpoints: dict[int, bytes]) -> None:
    items = client.get(f"/v1/jobs/{job}/checkpoints").json()["items"]
    assert [(c["version"], c["best"], c["accuracy"]) for c in items] == [
        (3, False, 0.7),
        (2, True, 0.9),
        (1, False, 0.5),
    ]
    for which, version in (("1", 1), ("latest", 3), ("best", 2)):
        answer = client.get(f"/v1/jobs/{job}/checkpoints/{which}")
        assert answer.content == checkpoints[version]
        assert answer.headers["etag"] == f'"{version:064x}"'
        assert np.array_equal(load(answer.content)["w"], np.full(1000, version, np.float32))
    assert client.get(items[0]["url"]).content == checkpoints[3]
    assert client.get(f"/v1/jobs/{job}/checkpoints/9").status_code == 404


def test_a_version_tells_its_scores_by_class_only_when_asked(
    client: TestClient, job: str, checkpoints: dict[int, bytes], tmp_path: Path
) -> None:
    url, artifacts = f"/v1/jobs/{job}/checkpoints", Artifacts(tmp_path / "artifacts", job)
    missing = client.get(f"{url}/2/classes")
    assert missing.status_code == 404 and "no scores by class" in missing.json()["detail"]
    actual, given = np.array([0, 0, 0, 1, 1, 2]), np.array([0, 0, 1, 1, 1, 1])
    counts = class_counts.count_classes(actual, given, 4, ("cat", "<dog>", "fish", "newt"))
    artifacts.save_classes(Token.parse(token(2)), "test", counts.model_dump())
    found = client.get(f"{url}/best/classes").json()
    (part,) = found["parts"]
    assert (found["version"], part["part"], part["samples"]) == (2, "test", 6)
    cat = {"number": 0, "name": "cat", "precision": 1.0, "recall": 2 / 3, "f1": 0.8, "support": 3}
    newt = {"number": 3, "name": "newt", "precision": None, "recall": None, "f1": None, "support": 0}
    assert (part["classes"][0], part["classes"][3]) == (cat, newt)
    assert part["confusion"][:3] == [[2, 1, 0, 0], [0, 2, 0, 0], [0, 1, 0, 0]]
    assert part["confused"][0] == {"actual": 0, "predicted": 1, "samples": 1}
    page = client.get(f"/jobs/{job}/classes").text
    assert "&lt;dog&gt;" in page and 'class="heat-6 right">2<' in page and "66.67 %" in page
    assert client.get(f"/jobs/{job}/classes?version=1").status_code == 404
    assert "confusion" not in client.get(f"/v1/jobs/{job}").text + client.get(url).text
    many = class_counts.count_classes(actual, given, 1000, None)
    artifacts.save_classes(Token.parse(token(3)), "test", many.model_dump())
    assert client.get(f"{url}/3/classes").json()["parts"][0]["confusion"] is None
    assert "Most frequent mistakes" in client.get(f"/jobs/{job}/classes?version=3").text
    artifacts.path(Token.parse(token(3)), "classes.json").write_text('{"test": {"support": "x"}}')
    assert client.get(f"{url}/3/classes").status_code == 404


def test_the_moving_average_is_downloaded_unless_the_version_itself_is_asked_for(
    client: TestClient, redis: Redis, feed: Feed, job: str, tmp_path: Path
) -> None:
    feed.open()
    feed.join()
    feed.commit()
    artifacts, saved = Artifacts(tmp_path / "artifacts", job), Token.parse(token(1))
    tensors = [{"w": np.full(1000, value, np.float32)} for value in (1, 2)]
    manifest = artifacts.finish(artifacts.stage(saved, tensors[0], [b"state"], tensors[1]), f"{1:064x}", 0, 4)
    feed.save()
    project(client, redis)
    url = f"/v1/jobs/{job}/checkpoints"
    assert [one["sha256"] for one in client.get(url).json()["items"]] == [manifest.average]
    for query, value, sha256 in (("", 2, manifest.average), ("?weights=raw", 1, f"{1:064x}")):
        answer = client.get(f"{url}/latest{query}")
        assert answer.headers["etag"] == f'"{sha256}"'
        assert np.array_equal(load(answer.content)["w"], np.full(1000, value, np.float32))


def test_scores_on_a_validation_split_are_called_so_and_the_test_set_comes_at_the_end(
    client: TestClient, redis: Redis, tmp_path: Path
) -> None:
    document = {**SPEC, "validation": 0.1, "rounds": 2}
    job = client.post("/v1/jobs", json=document).json()["id"]
    feed = Feed(redis, job, JobSpec(**document).plan)
    feed.open()
    feed.join()
    artifacts = Artifacts(tmp_path / "artifacts", job)
    for version, accuracy in ((1, 0.75), (2, 0.5)):
        feed.commit()
        saved = Token.parse(token(version))
        write_checkpoint(artifacts, saved, {"w": np.zeros(1, np.float32)}, b"state", "0" * 64, 0, 4)
        feed.save()
        if version == 1:
            feed.score(accuracy)
        project(client, redis)
        assert client.get(f"/v1/jobs/{job}").json()["tested"] is None
    best, last = ({"loss": 1.5, "accuracy": value, "samples": 10_000} for value in (0.625, 0.25))
    feed.score(0.75, version=1, test=best)
    feed.score(0.5, test=last)
    project(client, redis)
    shown, metrics = client.get(f"/v1/jobs/{job}").json(), client.get(f"/v1/jobs/{job}/metrics").json()
    assert (shown["status"], shown["best_version"], shown["accuracy"]) == ("completed", 1, 0.5)
    assert (shown["tested"], shown["tested_last"]) == (
        {"version": 1, **best, "own_metrics": None},
        {"version": 2, **last, "own_metrics": None},
    )
    saved_ones = client.get(f"/v1/jobs/{job}/checkpoints").json()["items"]
    assert [one["tested"] for one in saved_ones] == [shown["tested_last"], shown["tested"]]
    assert [point["value"] for point in metrics["validation_accuracy"]] == [0.75, 0.5]
    assert [point["value"] for point in metrics["test_accuracy"]] == [0.625, 0.25]
    page = client.get(f"/jobs/{job}").text
    assert "Validation accuracy" in page and "lowest validation loss" in page
    assert (
        ">62.50 %<" in page
        and "best (version 1); last 25.00 %" in page
        and "Version 1 scored 62.50 % on the test set" in page
    )
    assert "test 62.50 %" in client.get("/").text


def test_a_language_models_samples_stay_when_its_checkpoints_go_and_are_only_text(
    client: TestClient, redis: Redis
) -> None:
    job = client.post("/v1/jobs", json={"dataset": "tinyshakespeare", "model": "gpt", "rounds": 20}).json()["id"]
    feed = Feed(redis, job, JobSpec(dataset="tinyshakespeare", model="gpt", rounds=20).plan)
    feed.open()
    feed.join()
    for version in range(1, 13):
        feed.commit(submissions=False)
        feed.score(version=version, sample=f"<b>text {version}</b>")
    project(client, redis)
    url = f"/v1/jobs/{job}/samples"
    page = client.get(f"{url}?limit=5").json()
    rest = client.get(f"{url}?limit=50&cursor={page['next_cursor']}").json()
    samples = page["items"] + rest["items"]
    assert [one["version"] for one in samples] == list(range(12, 0, -1)) and rest["next_cursor"] is None
    assert (samples[0]["text"], samples[0]["loss"]) == ("<b>text 12</b>", 0.5)
    html = client.get(f"/jobs/{job}").text
    shown = [version for version in range(1, 13) if f"&lt;b&gt;text {version}&lt;/b&gt;" in html]
    assert shown == [1, 4, 6, 8, 10, 12] and "<b>text" not in html


def test_download_can_be_resumed_and_is_not_repeated(
    client: TestClient, job: str, checkpoints: dict[int, bytes]
) -> None:
    url = f"/v1/jobs/{job}/checkpoints/latest"
    whole = client.get(url)
    part = client.get(url, headers={"Range": "bytes=100-", "If-Range": whole.headers["etag"]})
    assert (part.status_code, part.content) == (206, checkpoints[3][100:])
    changed = client.get(url, headers={"Range": "bytes=100-", "If-Range": '"other"'})
    assert (changed.status_code, changed.content) == (200, checkpoints[3])
    assert client.get(url, headers={"If-None-Match": whole.headers["etag"]}).status_code == 304
    head = client.head(url)
    assert head.headers["content-length"] == str(len(checkpoints[3])) and head.content == b""
    for range_, status in (("bytes=999999-", 416), ("bytes=x-y", 400)):
        refused = client.get(url, headers={"Range": range_})
        assert (refused.status_code, refused.headers["content-type"]) == (status, PROBLEM)
        assert refused.headers["content-range"] == (f"bytes */{len(checkpoints[3])}" if status == 416 else "bytes */*")


def test_checkpoint_whose_files_are_gone_is_not_offered(
    client: TestClient, job: str, checkpoints: dict[int, bytes], tmp_path: Path
) -> None:
    shutil.rmtree(Artifacts(tmp_path / "artifacts", job).path(Token.parse(token(3))))
    assert [c["version"] for c in client.get(f"/v1/jobs/{job}/checkpoints").json()["items"]] == [2, 1]
    assert client.get(f"/v1/jobs/{job}/checkpoints/latest").content == checkpoints[2]


def test_workers_and_queues_are_those_online(client: TestClient, redis: Redis) -> None:
    queue = f"q{secrets.token_hex(4)}"
    worker = WorkerInfo(secrets.token_hex(6), "<b>mac</b>", "mps", (queue,), {"torch": "2"}, 16, "host", 7)
    worker = replace(worker, recipes=("*",), confinement="landlock")
    register(redis, worker)
    client.post("/v1/jobs", json={**SPEC, "queue": queue, "workers": {"min": 2, "max": 2}})
    found = {w["id"]: w for w in client.get("/v1/workers").json()["items"]}[worker.id]
    assert (found["name"], found["device"], found["samples_per_s"]) == ("<b>mac</b>", "mps", 0.0)
    assert (found["recipes"], found["confinement"]) == (["*"], "landlock")
    assert found["last_seen"].endswith("Z")
    shown = client.get("/workers").text
    assert "Runs all recipes, confined by landlock" in shown
    queues = {q["name"]: q for q in client.get("/v1/queues").json()["items"]}
    assert (queues[queue]["workers"], queues[queue]["queued"], queues[queue]["running"]) == (1, 1, 0)


def test_a_data_set_that_needs_a_missing_package_says_what_to_install(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "h5py" else found(name))
    answer = client.post("/v1/jobs", json={**SPEC, "dataset": "pcam"})
    assert answer.status_code == 422
    [error] = answer.json()["errors"]
    assert error["field"] == "dataset" and "h5py: pip install 'computeshare[data]'" in error["detail"]


@pytest.mark.parametrize(
    ("change", "field", "says"),
    [
        ({"dataset": "imagenet21k"}, "dataset", "digits"),
        ({"model": "lenet9"}, "model", "lenet5"),
        ({"model": "lenet5"}, "model", "8x8"),
        ({"epochs": 3}, "rounds", "not both"),
        ({"optimizer": {"name": "Sgd"}}, "optimizer.name", "AdamW"),
        ({"optimizer": {"name": "SGD", "betas": [0.9, 0.9]}}, "optimizer.betas", "momentum"),
        ({"optimizer": {"name": "SGD", "nesterov": True}}, "optimizer.nesterov", "momentum above 0"),
        ({"micro_batch": "32"}, "micro_batch", "integer"),
        ({"strategy": {"kind": "rumour"}}, "strategy.kind", "sync"),
        ({"codec": {"up": "int2"}}, "codec.up", "float16"),
        ({"workers": {"min": 5, "max": 2}}, "workers", "greater than max"),
        ({"workers": {"most": 5}}, "workers.most", "allowed: max, min"),
        ({"workers": {"min": 5}}, "workers.min", "must be at most 4"),
        ({"micro_batch": 0}, "micro_batch", "must be at least 1"),
        ({"micro_batch": "many"}, "micro_batch", "integer"),
        ({"queue": "a b"}, "queue", "pattern"),
        ({"colour": "red"}, "colour", "micro_batches_per_round"),
        ({"precision": "float16"}, "precision", "'bfloat16', or 'auto'"),
        ({"augment": "crop"}, "augment", "send a JSON list"),
        ({"schedule": "cosine"}, "schedule", "send a JSON object"),
        ({"stop": {"metric": "accuracy", "at": 98}}, "stop.at", "a fraction"),
    ],
)
def test_wrong_spec_is_a_problem_that_names_the_field_and_what_is_allowed(
    change: dict[str, Any], field: str, says: str, client: TestClient
) -> None:
    answer = client.post("/v1/jobs", json={**SPEC, **change})
    assert (answer.status_code, answer.headers["content-type"]) == (422, PROBLEM)
    problem = answer.json()
    assert {"type", "title", "status", "detail", "errors"} <= problem.keys()
    named = {e["field"]: e for e in problem["errors"]}
    assert says in named[field]["detail"]
    assert named[field]["pointer"] == "/" + field.replace(".", "/")
    assert field in problem["detail"]


@pytest.mark.parametrize(
    "path",
    ["/v1/jobs", "/", "/workers", "/metrics", "/openapi.json", "/docs", "/nowhere", "/v1/jobs/x", "/v1/version"],
)
def test_nothing_is_answered_without_credentials(path: str, client: TestClient) -> None:
    for value in ("", "Bearer", "Bearer wrong", "Basic secret", "secret", "Bearer secre", "Bearer secret2"):
        answer = client.get(path, headers={"Authorization": value})
        assert (answer.status_code, answer.headers["content-type"]) == (401, PROBLEM)
        assert answer.headers["www-authenticate"] == "Bearer"


def test_browser_without_login_is_told_where_the_link_is(client: TestClient) -> None:
    answer = client.get("/", headers={"Authorization": "", "Accept": "text/html,*/*"})
    assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
    assert "computeshare login" in answer.text and "secret" not in answer.text


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ("/jobs/ab12cd34?smoothing=3&across=time", "/jobs/ab12cd34?smoothing=3&amp;across=time"),
        ("/login?key=wrong&next=/workers", "/workers"),
        ("/login?key=wrong&next=//evil.example/", None),
        ("/login?key=wrong&next=https://evil.example/", None),
        ("//evil.example/x", None),
    ],
)
def test_whoever_has_to_log_in_is_led_on_to_the_page_that_was_asked_for(
    asked: str, kept: str | None, client: TestClient
) -> None:
    answer = client.get(f"http://localhost{asked}", headers={"Authorization": "", "Accept": "text/html"})
    assert answer.status_code == 401
    hidden = re.findall(r'<input type="hidden" name="next" value="([^"]*)">', answer.text)
    assert hidden == ([kept] if kept else [])


def test_a_login_link_may_be_pasted_where_a_browser_is_not_logged_in(settings: Settings) -> None:
    link = f"http://studio.local:8000{login_path('secret')}&next=/workers"
    with TestClient(create_app(settings), base_url="http://localhost") as browser:
        answer = browser.get("/login", params={"key": f" {link}\n", "next": "/jobs/ab12"}, follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (303, "/jobs/ab12")
        assert "This is not a login link" in browser.get("/login?key=http://studio.local/login?key=wrong").text
        assert "This is not" not in browser.get("/login").text


def test_the_release_is_told_to_those_who_may_know_it(client: TestClient) -> None:
    assert client.get("/v1/version").json() == {"version": __version__, "protocol": PROTOCOL}


def test_health_needs_no_credentials(client: TestClient) -> None:
    for path in ("/healthz", "/readyz"):
        assert client.get(path, headers={"Authorization": ""}).status_code == 200


def test_login_link_gives_a_cookie_that_lets_in(settings: Settings) -> None:
    with TestClient(create_app(settings), base_url="http://localhost") as browser:
        assert browser.get("/login?key=wrong").status_code == 401
        answer = browser.get(login_path("secret"), follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie and "samesite=lax" in cookie.lower() and "secret" not in cookie
        assert browser.get("/v1/jobs").status_code == 200
        assert browser.post("/v1/jobs", json=SPEC, headers={"Origin": "http://localhost"}).status_code == 201
        for headers in (
            {"Origin": "http://localhost:3000"},
            {"Origin": "null"},
            {"Sec-Fetch-Site": "same-site", "Origin": "http://localhost"},
            {"Sec-Fetch-Site": "cross-site"},
        ):
            assert browser.post("/v1/jobs", json=SPEC, headers=headers).status_code == 403


@pytest.mark.parametrize(
    ("following", "leads_to"),
    [
        ("/jobs/abcdefgh", "/jobs/abcdefgh"),
        ("//evil.example", "/"),
        ("/\\evil.example", "/"),
        ("https://evil.example", "/"),
        ("/jobs\r\nX: y", "/"),
        ("", "/"),
    ],
)
def test_login_leads_only_to_pages_of_its_own(following: str, leads_to: str, settings: Settings) -> None:
    with TestClient(create_app(settings), base_url="http://localhost") as browser:
        url, query = login_path("secret").split("?")
        key = query.removeprefix("key=")
        answer = browser.get(url, params={"key": key, "next": following}, follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (303, leads_to)


def test_foreign_host_header_is_refused(client: TestClient) -> None:
    for path in ("/healthz", "/v1/jobs", "/static/style.css"):
        answer = client.get(path, headers={"Host": "evil.example"})
        assert (answer.status_code, answer.headers["content-type"]) == (400, PROBLEM)


@pytest.mark.parametrize(
    "path", ["/healthz", "/v1/jobs", "/v1/jobs/nope", "/nowhere", "/docs", "/static/nowhere.js", "/"]
)
@pytest.mark.parametrize("authorization", ["Bearer secret", ""])
def test_every_answer_carries_the_security_headers(path: str, authorization: str, client: TestClient) -> None:
    headers = client.get(path, headers={"Authorization": authorization}).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
    assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")


def test_large_body_is_refused_whether_its_length_is_told_or_not(client: TestClient) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(140):
            yield b" " * 65536

    for content in (b" " * (8 * 1024 * 1024 + 1), chunks()):
        answer = client.post("/v1/jobs", content=content, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.headers["content-type"]) == (413, PROBLEM)
        assert "content-security-policy" in answer.headers


def test_the_place_of_an_error_is_short_however_deep_it_lies(client: TestClient) -> None:
    deep = '{"recipe": "sha256:", "recipe_args": {"a": ' + "[" * 150 + "Infinity" + "]" * 150 + "}}"
    answer = client.post("/v1/jobs", content=deep, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert all(len(one["field"]) < 200 and len(one["pointer"]) < 200 for one in answer.json()["errors"])


def test_a_value_for_none_of_several_kinds_is_one_error_of_its_field(client: TestClient, job: str) -> None:
    answers = client.get("/v1/jobs?status=lost"), client.post(f"/v1/jobs/{job}/fork", json={"version": "newest"})
    [status], [version] = (answer.json()["errors"] for answer in answers)
    assert (status["field"], version["field"], version["pointer"]) == ("status.0", "version", "/version")
    assert "'failed' or 'cancelled'" in status["detail"] and version["detail"].endswith(", or 'latest' or 'best'")


@pytest.mark.parametrize("kind", ["application/json", "text/plain", ""])
def test_a_request_without_json_says_what_to_send(client: TestClient, kind: str) -> None:
    content = "" if kind == "application/json" else '{"dataset": "digits"}'
    answer = client.post("/v1/jobs", content=content, headers={"Content-Type": kind})
    assert (answer.status_code, answer.headers["content-type"]) == (422, PROBLEM)
    assert "send a JSON object, with the header Content-Type: application/json" in answer.json()["detail"]


def test_docs_and_schema_are_served_locally(client: TestClient) -> None:
    page, schema = client.get("/docs"), client.get("/openapi.json").json()
    assert "/v1/jobs/{job_id}/cancel" in page.text and "http" not in page.text
    assert "/v1/jobs" in schema["paths"] and "JobSpec" in schema["components"]["schemas"]


def test_the_schema_says_which_routes_are_open(client: TestClient) -> None:
    schema = client.get("/openapi.json").json()
    assert [schema["components"]["securitySchemes"][name]["scheme"] for name in schema["security"][0]] == ["bearer"]
    del client.headers["Authorization"]
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            refused = client.request(method, path).status_code == 401 and path != "/login"
            assert refused == (operation.get("security") != []), (method, path)


def test_prometheus_figures_count_jobs_and_requests_by_route(client: TestClient, job: str) -> None:
    client.get(f"/v1/jobs/{job}")
    client.get("/v1/jobs/nope")
    client.get("/nowhere")
    text = client.get("/metrics").text
    assert 'computeshare_jobs{status="queued"} 1.0' in text
    assert 'computeshare_http_requests_total{method="GET",route="/v1/jobs/{job_id}",status="200"} 1.0' in text
    assert 'computeshare_http_requests_total{method="GET",route="/v1/jobs/{job_id}",status="404"} 1.0' in text
    assert "computeshare_broker_up 1.0" in text and "nowhere" not in text and job not in text


def test_readiness_names_what_is_wrong_and_reading_goes_on_without_a_broker(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, redis_url=f"unix://{tmp_path}/nowhere.sock", token="secret")
    headers = {"Authorization": "Bearer secret"}
    with TestClient(create_app(settings), base_url="http://localhost", headers=headers) as client:
        answer = client.get("/readyz")
        found = answer.json()["dependencies"]
        assert answer.status_code == 503 and answer.headers["retry-after"] == "2"
        assert found["sqlite"]["ok"] and not found["broker"]["ok"] and "nowhere.sock" in found["broker"]["detail"]
        job = client.post("/v1/jobs", json=SPEC)
        assert job.status_code == 201 and client.get(job.headers["location"]).status_code == 200
        assert client.get("/workers").status_code == 200
        away = client.get("/v1/workers")
        assert (away.status_code, away.headers["content-type"]) == (503, PROBLEM)
        assert away.headers["retry-after"]
        assert "computeshare_broker_up 0.0" in client.get("/metrics").text


def test_a_job_that_waits_for_workers_leaves_the_control_plane_ready(
    client: TestClient, redis: Redis, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "PATIENCE_MS", 0)
    assert wait_until(lambda: client.get(f"/v1/jobs/{job}").json()["reason"])  # the dispatcher has seen it
    assert client.get("/readyz").json()["dependencies"]["reducer"]["ok"]
    RoundStore(redis, job).publish(JobSpec(**SPEC).model_dump_json())
    found = client.get("/readyz").json()["dependencies"]["reducer"]
    assert not found["ok"] and job in found["detail"]


def test_readiness_waits_until_up_has_named_its_processes_in_the_run_file(settings: Settings) -> None:
    def is_ready(up: int, **pids: list[int]) -> bool:
        RunFile(url="", redis_url="", pids={"up": [up], **pids}).write(settings.run_path)
        return bool(client.get("/readyz").json()["dependencies"]["reducer"]["ok"])

    with TestClient(create_app(settings), base_url="http://localhost") as client:
        assert not is_ready(os.getppid(), reducer=[1])
        assert is_ready(os.getpid()), "of an `up` that did not start this process"
        assert is_ready(os.getppid(), reducer=[1, 2]), "once ready, a process that is started again changes nothing"
    with TestClient(create_app(settings), base_url="http://localhost") as client:
        assert not is_ready(os.getppid(), reducer=[1, 2])
        assert is_ready(os.getppid(), reducer=[1, 2], evaluator=[3])


def test_without_a_known_broker_the_answer_says_how_to_name_one(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, token="secret")
    headers = {"Authorization": "Bearer secret"}
    with TestClient(create_app(settings), base_url="http://localhost", headers=headers) as client:
        answer = client.get("/v1/workers")
        assert answer.status_code == 503 and "COMPUTESHARE_REDIS_URL" in answer.json()["detail"]


def test_locked_database_is_a_503_that_says_when_to_try_again(
    client: TestClient, tmp_path: Path, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    services: Any = client.app.state.services  # type: ignore[attr-defined]
    services.control.stop()
    engine = services.database.engine
    engine.dispose()
    event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA busy_timeout=50"))
    holder = sqlite3.connect(tmp_path / "computeshare.db", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    try:
        answer = client.post("/v1/jobs", json=SPEC)
        assert (answer.status_code, answer.headers["content-type"]) == (503, PROBLEM)
        assert answer.headers["retry-after"] == "2" and "locked" in answer.json()["detail"]
        assert client.get(f"/v1/jobs/{job}").status_code == 200  # readers do not wait for writers
    finally:
        holder.execute("ROLLBACK")
        holder.close()
    assert client.post("/v1/jobs", json=SPEC).status_code == 201


def test_full_disk_is_a_503_and_leaves_the_database_whole(client: TestClient, job: str) -> None:
    services: Any = client.app.state.services  # type: ignore[attr-defined]
    services.control.stop()
    engine = services.database.engine
    engine.dispose()
    limit = "PRAGMA max_page_count=1"  # SQLite's own limit: no page can be added
    event.listen(engine, "connect", lambda connection, _: connection.execute(limit))
    answers = [client.post("/v1/jobs", json={**SPEC, "name": "x" * 100}).status_code for _ in range(200)]
    assert answers[-1] == 503 and set(answers) <= {201, 503}
    assert client.get(f"/v1/jobs/{job}").status_code == 200
    assert len(client.get("/v1/jobs?limit=500").json()["items"]) == 1 + answers.count(201)


def test_second_control_plane_answers_but_leaves_the_work_to_the_first(client: TestClient, settings: Settings) -> None:
    first: Any = client.app.state.services  # type: ignore[attr-defined]
    assert wait_until(lambda: first.control.leading)
    headers = {"Authorization": "Bearer secret"}
    with TestClient(create_app(settings), base_url="http://localhost", headers=headers) as other:
        second: Any = other.app.state.services  # type: ignore[attr-defined]
        assert wait_until(lambda: second.control.loops[0].turns > 1)
        assert not second.control.leading
        job = other.post("/v1/jobs", json=SPEC).json()["id"]
        assert wait_until(lambda: client.get(f"/v1/jobs/{job}").json()["reason"].startswith("Needs 1 worker"))
        assert other.get("/readyz").json()["dependencies"]["control"]["detail"].startswith("another")
        first.control.stop()
        assert wait_until(lambda: second.control.leading)


def test_pages_and_json_are_compressed_for_whoever_takes_it_and_weights_are_not(
    client: TestClient, job: str, checkpoints: dict[int, bytes]
) -> None:
    taking = {"accept-encoding": "gzip"}
    for path in (f"/jobs/{job}", f"/v1/jobs/{job}", "/static/style.css"):
        assert client.get(path, headers=taking).headers["content-encoding"] == "gzip"
        assert "content-encoding" not in client.get(path, headers={"accept-encoding": "identity"}).headers
    weights = client.get(f"/v1/jobs/{job}/checkpoints/2", headers=taking)
    assert "content-encoding" not in weights.headers and weights.content == checkpoints[2]
