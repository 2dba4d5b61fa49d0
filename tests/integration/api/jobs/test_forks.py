"""Forks and the log of versions over REST, with a real broker behind it."""

import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis import Redis
from safetensors.numpy import load_file
from sqlalchemy import update
from starlette.testclient import TestClient

from api.projection.projector import Projector
from api.tables import VersionRow, table
from computeshare.checkpoints.store import WEIGHTS, Artifacts
from computeshare.errors import ArtifactError
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol.round_store import RoundStore
from computeshare.types import Token
from tests.support.checkpoints import write_checkpoint
from tests.support.event_stream import WORKERS, Feed, token
from tests.support.scheduling_clock import online

SPEC: dict[str, Any] = {"dataset": "digits", "model": "mlp", "epochs": 2, "seed": 7, "queue": "nobody"}
PLAN = JobSpec(**SPEC).plan


@pytest.fixture
def artifacts(client: TestClient, tmp_path: Path) -> Artifacts:
    """Those of a job that is to be forked."""
    return Artifacts(tmp_path / "artifacts", str(client.post("/v1/jobs", json=SPEC).json()["id"]))


@pytest.fixture
def parent(client: TestClient, redis: Redis, artifacts: Artifacts) -> str:
    """A job with three versions on disk, the second one the best."""
    feed = Feed(redis, artifacts.folder.name, PLAN)
    feed.open()
    feed.join()
    for version, accuracy in ((1, 0.5), (2, 0.9), (3, 0.7)):
        feed.commit(worker=WORKERS[version % 2])
        tensors = {"w": np.full(1000, version, np.float32)}
        write_checkpoint(
            artifacts, Token.parse(token(version)), tensors, b"state %d" % version, f"{version:064x}", 0, 4 * version
        )
        feed.save()
        feed.score(accuracy)
    project(client, redis)
    return artifacts.folder.name


def project(client: TestClient, redis: Redis) -> None:
    Projector(client.app.state.services.database).step(redis)  # type: ignore[attr-defined]


@pytest.fixture
def fork(client: TestClient, parent: str) -> Callable[..., Any]:
    def fork(key: str | None = None, **request: Any) -> Any:
        headers = {"Idempotency-Key": key} if key else {}
        return client.post(f"/v1/jobs/{parent}/fork", json=request, headers=headers)

    return fork


def test_a_fork_of_a_model_with_untrained_parameters_keeps_the_seed_they_are_built_from(
    client: TestClient, redis: Redis, artifacts: Artifacts, tmp_path: Path
) -> None:
    feed = Feed(redis, artifacts.folder.name, PLAN)
    feed.open()
    feed.join()
    feed.commit()
    frozen = "f" * 64
    about = (f"{1:064x}", 0, 4, (), (), frozen)
    write_checkpoint(artifacts, Token.parse(token(1)), {"w": np.zeros(9, np.float32)}, b"state", *about)
    feed.save()
    project(client, redis)
    address = f"/v1/jobs/{artifacts.folder.name}/fork"
    refused = client.post(address, json={"spec": {"seed": 8}})
    assert refused.status_code == 422 and "leave seed out" in refused.text
    own = Artifacts(tmp_path / "artifacts", client.post(address, json={"spec": {"epochs": 3}}).json()["id"])
    assert own.manifest(own.tokens()[0]).frozen == frozen


@pytest.mark.parametrize(("version", "number"), [(1, 1), ("best", 2), ("latest", 3), (None, 3)])
def test_a_fork_is_a_job_that_names_its_origin(
    client: TestClient, parent: str, fork: Callable[..., Any], version: object, number: int, tmp_path: Path
) -> None:
    answer = fork(**({} if version is None else {"version": version}))
    job = answer.json()
    assert (answer.status_code, answer.headers["location"]) == (201, f"/v1/jobs/{job['id']}")
    about = {"job_id": parent, "version": number, "sha256": f"{number:064x}", "optimizer": "kept"}
    assert job["forked_from"] == about == client.get(f"/v1/jobs/{job['id']}").json()["forked_from"]
    assert (job["status"], job["version"], job["name"]) == ("queued", 0, f"mlp on digits from version {number}")
    assert job["spec"] == {**client.get(f"/v1/jobs/{parent}").json()["spec"], "name": job["name"]}
    own, origin = Artifacts(tmp_path / "artifacts", job["id"]), Token(0, 0, f"{number:064x}"[:16])
    assert own.tokens() == [origin]
    assert (own.state(origin), own.manifest(origin).version) == (b"state %d" % number, 0)
    assert load_file(own.path(origin, WEIGHTS))["w"][0] == number
    (listed,) = client.get(f"/v1/jobs/{job['id']}/checkpoints").json()["items"]
    assert (listed["version"], listed["sha256"]) == (0, f"{number:064x}")
    assert client.get(f"/v1/jobs/{parent}").json()["forked_from"] is None


def test_a_fork_is_published_with_its_origin(fork: Callable[..., Any], redis: Redis, queue: str) -> None:
    online(redis, queue)
    store = RoundStore(redis, fork(version=2, spec={"queue": queue}).json()["id"])
    deadline = time.monotonic() + 10
    while store.spec() is None:
        assert time.monotonic() < deadline, "it was not published"
        time.sleep(0.02)
    assert redis.get(store.keys.origin()) == f"0.0.{2:064x}"[:20].encode()


def test_a_fork_outlives_its_parent(client: TestClient, parent: str, fork: Callable[..., Any], tmp_path: Path) -> None:
    job_id = fork(version=2).json()["id"]
    client.post(f"/v1/jobs/{parent}/cancel")
    assert client.delete(f"/v1/jobs/{parent}").status_code == 204
    assert not (tmp_path / "artifacts" / parent).exists()
    assert client.get(f"/v1/jobs/{job_id}/checkpoints/0/state").content == b"state 2"
    assert client.get(f"/v1/jobs/{job_id}").json()["forked_from"]["job_id"] == parent


def test_the_optimizers_state_goes_along_unless_the_optimizer_changes_or_it_is_told_not_to(
    client: TestClient, fork: Callable[..., Any]
) -> None:
    slower, changed = {"optimizer": {"lr": 0.01}}, {"optimizer": {"momentum": 0.5}}
    kept, told, other = fork(spec=slower).json(), fork(optimizer="fresh").json(), fork(spec=changed).json()
    assert [job["forked_from"]["optimizer"] for job in (kept, told, other)] == ["kept", "fresh", "fresh"]
    assert kept["spec"]["optimizer"] == {"name": "SGD", "lr": 0.01, "momentum": 0.9}
    states = [client.get(f"/v1/jobs/{job['id']}/checkpoints/0/state").content for job in (kept, told, other)]
    assert states == [b"state 3", b"", b""]
    refused = fork(spec=changed, optimizer="kept")
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "optimizer")


@pytest.mark.parametrize(
    ("request_body", "field"),
    [
        ({"spec": {"model": "simplenet", "input": [1, 28, 28]}}, "spec.model"),
        ({"spec": {"dataset": "mnist"}}, "spec.dataset"),
        ({"spec": {"input": [1, 16, 16]}}, "spec.input"),
        ({"spec": {"model": "lenet5"}}, "spec.model"),
        ({"spec": {"optimizer": {"lr": "fast"}}}, "spec.optimizer"),
        ({"spec": {"codec": {"up": "zip"}}}, "spec.codec.up"),
        ({"spec": {"surprise": 1}}, "spec.surprise"),
        ({"spec": 5}, "spec"),
        ({"version": "newest"}, "version"),
        ({"version": -1}, "version"),
        ({"optimizer": "old"}, "optimizer"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_what_cannot_be_is_answered_with_its_field(
    client: TestClient, fork: Callable[..., Any], request_body: dict[str, Any], field: str, tmp_path: Path
) -> None:
    answer = fork(**request_body)
    fields = [error["field"] for error in answer.json()["errors"]]
    assert answer.status_code == 422 and all(one.startswith(field) for one in fields), answer.text
    assert len(client.get("/v1/jobs").json()["items"]) == 1
    assert len(list((tmp_path / "artifacts").iterdir())) == 1


def test_an_unknown_field_of_the_specification_is_told_those_there_are(fork: Callable[..., Any]) -> None:
    (error,) = fork(spec={"codec": {"sideways": 1}}).json()["errors"]
    assert (error["pointer"], error["detail"]) == ("/spec/codec/sideways", "unknown field; allowed: down, up")


def test_a_version_that_was_not_kept_is_answered_with_where_to_look(
    client: TestClient, parent: str, fork: Callable[..., Any]
) -> None:
    answer = fork(version=30)
    assert answer.status_code == 404 and f"see /v1/jobs/{parent}/checkpoints" in answer.json()["detail"]
    assert client.post(f"/v1/jobs/{secrets.token_hex(4)}/fork", json={}).status_code == 404


def test_a_version_that_is_removed_just_then_leaves_nothing_behind(
    fork: Callable[..., Any], artifacts: Artifacts, tmp_path: Path
) -> None:
    artifacts.path(Token.parse(token(3)), "state.safetensors").unlink()
    answer = fork(version=3)
    assert answer.status_code == 404 and "has just been removed: fork another" in answer.json()["detail"]
    assert [path.name for path in (tmp_path / "artifacts").iterdir()] == [artifacts.folder.name]


def test_repeated_forks_with_the_same_key_make_one_job(
    client: TestClient, fork: Callable[..., Any], redis: Redis, artifacts: Artifacts, tmp_path: Path
) -> None:
    key = secrets.token_hex(8)
    first = fork(key)
    write_checkpoint(artifacts, Token.parse(token(4)), {"w": np.zeros(2, np.float32)}, b"state 4", f"{4:064x}", 0, 16)
    second = fork(key)  # of the latest version still, whichever that is by now
    assert (first.status_code, second.status_code) == (201, 201)
    assert first.json()["id"] == second.json()["id"]
    assert len(list((tmp_path / "artifacts").iterdir())) == 2
    assert fork(key, version=1).status_code == 422
    assert client.post("/v1/jobs", json=SPEC, headers={"Idempotency-Key": key}).status_code == 422


def test_files_cannot_be_linked_everywhere(
    fork: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, client: TestClient
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("computeshare.checkpoints.store.os.link", refuse)
    job_id = fork(version=1).json()["id"]
    assert client.get(f"/v1/jobs/{job_id}/checkpoints/0/state").content == b"state 1"


def test_versions_are_told_with_what_they_were_made_of(client: TestClient, parent: str) -> None:
    page = client.get(f"/v1/jobs/{parent}/versions").json()
    assert page["next_since"] is None
    assert [(one["version"], one["token"], one["sha256"]) for one in page["items"]] == [
        (version, token(version), f"{version:064x}") for version in (1, 2, 3)
    ]
    assert page["items"][1]["counted"] == [[m, WORKERS[0], PLAN.size(m)] for m in range(4, 8)]


def test_versions_come_in_pages(client: TestClient, parent: str) -> None:
    path = f"/v1/jobs/{parent}/versions"
    first = client.get(path, params={"limit": 2}).json()
    assert ([one["version"] for one in first["items"]], first["next_since"]) == ([1, 2], 2)
    rest = client.get(path, params={"limit": 2, "since": 2}).json()
    assert ([one["version"] for one in rest["items"]], rest["next_since"]) == ([3], None)
    assert client.get(path, params={"since": 3}).json() == {"items": [], "next_since": None}
    assert client.get(path, params={"since": -1}).status_code == 422
    assert client.get("/v1/jobs/nothing/versions").status_code == 404


def test_versions_are_those_of_the_branch_that_stands(client: TestClient, redis: Redis, parent: str) -> None:
    feed = Feed(redis, parent, PLAN)
    feed.at_ms += 10_000
    feed.open(version=2, incarnation=2, restored=True)
    project(client, redis)
    path = f"/v1/jobs/{parent}/versions"
    assert [one["token"] for one in client.get(path).json()["items"]] == [token(1), token(2)]
    feed.commit()
    project(client, redis)
    third = client.get(path).json()["items"][2]
    assert (third["token"], third["sha256"]) == (token(3, incarnation=2), f"{3:064x}")
    assert [part[0] for part in third["counted"]] == [8, 9, 10, 11]


def test_the_kinds_of_a_worker_are_remembered_each_once(client: TestClient, redis: Redis, parent: str) -> None:
    feed = Feed(redis, parent, PLAN)
    about = {"worker": WORKERS[0], "session": "s2", "seat": "x", "name": "mac", "device": "cpu"}
    first, second = {"torch": "2.15.0", "threads": 1}, {"torch": "2.16.0", "threads": 1}
    for kind in (first, second, first):
        feed.send("joined", **about, kind=kind)
    project(client, redis)
    workers = {worker["id"]: worker for worker in client.get(f"/v1/jobs/{parent}/workers").json()["items"]}
    assert workers[WORKERS[0]]["kinds"] == [first, second]
    assert workers[WORKERS[1]]["kinds"] == []


def test_a_version_that_was_voided_is_no_part_of_the_log(client: TestClient, parent: str) -> None:
    with client.app.state.services.database.writing() as connection:  # type: ignore[attr-defined]
        rows = table(VersionRow)
        connection.execute(update(rows).where(rows.c.job_id == parent, rows.c.version == 2).values(voided=True))
    second = client.get(f"/v1/jobs/{parent}/versions").json()["items"][1]
    assert second == {"version": 2, "token": None, "sha256": None, "loss": None, "counted": [], "staleness": []}


def test_a_state_that_is_missing_is_said(client: TestClient, parent: str, artifacts: Artifacts) -> None:
    assert client.get(f"/v1/jobs/{parent}/checkpoints/best/state").content == b"state 2"
    artifacts.path(Token.parse(token(2)), "state.safetensors").unlink()
    with pytest.raises(ArtifactError):
        artifacts.state(Token.parse(token(2)))
    answer = client.get(f"/v1/jobs/{parent}/checkpoints/2/state")
    assert answer.status_code == 404 and "use another checkpoint" in answer.json()["detail"]
    shutil.rmtree(artifacts.folder)
    assert client.get(f"/v1/jobs/{parent}/checkpoints/2/state").status_code == 404
