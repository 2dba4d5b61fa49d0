"""The command line and the client against the real control plane on a real broker."""

import hashlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
from redis import Redis
from safetensors.numpy import load_file

from api.main import create_app
from api.schemas import CheckpointPublic, JobPublic
from computeshare.checkpoints.store import Artifacts
from computeshare.cli.main import app
from computeshare.client import Client
from computeshare.client.api.models import Checkpoint, Job
from computeshare.protocol.keys import JobKeys
from computeshare.settings import Settings
from computeshare.terminal.command import run
from computeshare.types import Token
from computeshare.worker import invite
from tests.support.checkpoints import write_checkpoint
from tests.support.wait import wait_until

CREATE = ["jobs", "create", "--dataset", "digits", "--model", "mlp", "--rounds", "20", "--queue"]


@pytest.fixture(scope="module")
def control_plane(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Settings]]:
    settings = Settings(home=tmp_path_factory.mktemp("home"), redis_url=redis_url, url=None, token=None)
    application = create_app(settings)
    server = uvicorn.Server(uvicorn.Config(application, port=0, log_level="warning", timeout_graceful_shutdown=3))
    application.state.services.stopping = lambda: server.should_exit
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", settings
    server.should_exit = True
    thread.join()


@pytest.fixture
def client(control_plane: tuple[str, Settings], monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    url, settings = control_plane
    for name, value in {"URL": url, "HOME": str(settings.home)}.items():
        monkeypatch.setenv(f"COMPUTESHARE_{name}", value)
    for name in ("TOKEN", "REDIS_URL"):
        monkeypatch.delenv(f"COMPUTESHARE_{name}", raising=False)
    with Client(url, settings.resolve_token()) as found:
        yield found


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    """The JSON document a command prints, which has to succeed."""
    assert run(app, [*arguments, "--json"]) == 0
    document: dict[str, object] = json.loads(capsys.readouterr().out)
    return document


def test_the_clients_words_are_the_apis() -> None:
    assert set(Job.__annotations__) <= set(JobPublic.model_fields)
    assert set(Checkpoint.__annotations__) <= set(CheckpointPublic.model_fields)


def test_a_job_from_its_creation_to_its_removal(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    made = command(capsys, *CREATE, "lifetime", "--lr", "0.1", "--idempotency-key", "once")
    job_id = str(made["id"])
    assert made["rounds_total"] == 20
    assert made["spec"]["optimizer"] == {"name": "SGD", "lr": 0.1, "momentum": 0.9}  # type: ignore[index]
    assert command(capsys, *CREATE, "lifetime", "--lr", "0.1", "--idempotency-key", "once")["id"] == job_id
    assert [job["id"] for job in command(capsys, "jobs", "list", "--queue", "lifetime")["items"]] == [job_id]  # type: ignore[attr-defined]
    assert command(capsys, "jobs", "show", job_id)["status"] == "queued"
    assert run(app, ["jobs", "delete", job_id, "--yes"]) == 2
    assert "cancel it first" in capsys.readouterr().err
    assert command(capsys, "jobs", "pause", job_id)["status"] == "paused"
    assert run(app, ["jobs", "pause", job_id]) == 2
    assert "is paused already" in capsys.readouterr().err
    assert command(capsys, "jobs", "resume", job_id)["status"] == "queued"
    assert run(app, ["jobs", "retry", job_id]) == 2
    assert "only a failed job can be retried" in capsys.readouterr().err
    assert command(capsys, "jobs", "cancel", job_id)["status"] == "cancelled"
    assert run(app, ["jobs", "cancel", job_id]) == 2
    assert "is already cancelled" in capsys.readouterr().err
    assert command(capsys, "jobs", "delete", job_id, "--yes") == {"id": job_id, "deleted": True}
    assert run(app, ["jobs", "show", job_id]) == 2
    assert capsys.readouterr().err == (f"error: there is no job {job_id}: `computeshare jobs list` lists all\n")


def test_jobs_are_renamed_found_and_sorted(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (str(command(capsys, *CREATE, "finding", "--name", name)["id"]) for name in ("b one", "c two"))
    assert command(capsys, "jobs", "rename", second, "a three")["name"] == "a three"
    assert run(app, ["jobs", "rename", first, ""]) == 0
    assert capsys.readouterr().out == f"{first} is now mlp on digits\n"

    def found(*flags: str) -> list[str]:
        return [job["id"] for job in command(capsys, "jobs", "list", "--queue", "finding", *flags)["items"]]  # type: ignore[attr-defined]

    assert found("--sort", "name") == [second, first]
    assert found("--sort", "oldest") == [first, second]
    assert found("--search", "A THREE") == [second]
    assert run(app, ["jobs", "list", "--search", "no such name"]) == 0
    assert capsys.readouterr().out == "no job matches\n"
    assert run(app, ["jobs", "list", "--sort", "colour"]) == 2


def test_human_output_of_every_reading_command(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, [*CREATE, "human", "--name", "[bold]odd[/bold]"]) == 0
    job_id, page = capsys.readouterr().out.split()
    assert page == f"{client.url}/jobs/{job_id}"
    assert run(app, ["jobs", "list", "--queue", "human"]) == 0
    assert f"{job_id}  [bold]odd[/bold]  ○ queued" in capsys.readouterr().out
    assert run(app, ["jobs", "show", job_id]) == 0
    shown = capsys.readouterr().out
    assert page in shown and "0 of 20" in shown and "0 accepted, 0 stale, 0 duplicate" in shown
    other = client.create({"dataset": "digits", "model": "mlp", "queue": "human"})["id"]
    assert run(app, ["jobs", "compare", job_id, other]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["Lowest", "test", "loss", "–", "–"] in rows and ["Dropped", *["0", "of", "0"] * 2] in rows
    client.cancel(job_id)
    client.cancel(other)


def test_a_list_longer_than_a_page_comes_whole(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("computeshare.client.api.requests.PAGE", 2)
    spec = {"dataset": "digits", "model": "mlp", "queue": "many"}
    made = [client.create(spec)["id"] for _ in range(5)]
    assert [job["id"] for job in client.jobs(queue="many", limit=None)] == made[::-1]  # three pages
    assert [job["id"] for job in client.jobs(["queued"], "many", limit=3)] == made[:1:-1]
    for job_id in made:
        client.cancel(job_id)
    assert list(client.jobs(["queued"], "many")) == []


def test_what_the_api_refuses_the_command_line_refuses_in_the_same_words(
    client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    for changes in (["--set", "workers.most=1"], ["--set", "epoch=1"], ["--seed", "-1"], ["--set", "codec.up=zip"]):
        assert run(app, [*CREATE, "q", *changes]) == 2
        ours = capsys.readouterr().err.rpartition("error: ")[2].strip()  # the control plane logs there too
        field, _, value = changes[-1].partition("=")
        path = {"-1": "seed"}.get(field, field).split(".")
        body: dict[str, object] = {"dataset": "digits", "model": "mlp", "rounds": 20, "queue": "q"}
        found: object = int(value or field) if (value or field).lstrip("-").isdecimal() else value
        for name in reversed(path):
            found = {name: found}
        with pytest.raises(Exception, match=path[0]) as caught:
            client.create({**body, **found})  # type: ignore[dict-item]
        assert str(caught.value) == ours


def test_a_wrong_token_is_not_allowed_in(
    client: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMPUTESHARE_TOKEN", "wrong")
    assert run(app, ["jobs", "list"]) == 4
    assert "COMPUTESHARE_TOKEN" in capsys.readouterr().err


def test_watching_ends_when_the_job_is_cancelled(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    job_id = client.create({"dataset": "digits", "model": "mlp", "queue": "watched"})["id"]
    canceller = threading.Thread(target=lambda: client.cancel(job_id))
    canceller.start()
    assert run(app, ["jobs", "watch", job_id, "--json"]) == 1
    canceller.join()
    captured = capsys.readouterr()
    assert json.loads(captured.out)["status"] == "cancelled"
    assert captured.err.splitlines()[-1].startswith("cancelled  0/")


def test_following_shows_each_event_once_and_in_order(client: Client, redis: Redis) -> None:
    job = client.create({"dataset": "digits", "model": "mlp", "queue": "followed"})
    publish(redis, job["id"], "joined", worker="w1", session="s", seat="x", name="w1", device="cpu")
    wait_until(lambda: client.show(job["id"])["workers"] == 1)
    client.cancel(job["id"])
    events = list(client.follow(job))
    kinds = [event.type for event in events if event.type != "job"]
    assert kinds == ["joined", "cancelled"]
    assert [event.id for event in events if event.id] == sorted({event.id for event in events if event.id})


def publish(redis: Redis, job_id: str, kind: str, **data: object) -> None:
    """What the training system would tell the control plane."""
    fields = {"type": kind, "at": str(int(time.time() * 1000)), "data": json.dumps(data)}
    redis.xadd(JobKeys(job_id).events(), fields)  # type: ignore[arg-type]


def test_a_checkpoint_is_downloaded_with_the_digest_that_the_job_shows(
    client: Client,
    control_plane: tuple[str, Settings],
    redis: Redis,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job_id = client.create({"dataset": "digits", "model": "mlp", "queue": "kept"})["id"]
    assert run(app, ["jobs", "download", job_id]) == 2
    assert "there are: none yet" in capsys.readouterr().err
    tensors = {"w": np.arange(100_000, dtype=np.float32)}
    token, sha256 = Token(1, 0, "0" * 16), hashlib.sha256(tensors["w"].tobytes()).hexdigest()
    manifest = write_checkpoint(Artifacts(control_plane[1].artifacts_dir, job_id), token, tensors, b"", sha256, 0, 0)
    publish(redis, job_id, "opened", token=str(token), version=0, incarnation=1, sha256=sha256, restored=False,
            parameters=100_000, bytes=400_000)  # fmt: skip
    publish(redis, job_id, "checkpoint", token=str(token), version=0, sha256=sha256, bytes=manifest.bytes,
            path=str(token))  # fmt: skip
    wait_until(lambda: client.checkpoints(job_id))
    path = tmp_path / "weights.safetensors"
    document = command(capsys, "jobs", "download", job_id, "-o", str(path))
    assert document == {"path": str(path), "version": 0, "bytes": manifest.bytes, "sha256": sha256}
    assert np.array_equal(load_file(path)["w"], tensors["w"])
    assert list(tmp_path.iterdir()) == [path]
    client.cancel(job_id)


def test_an_invite_made_at_the_command_line_lets_one_machine_in(
    client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["workers", "invite", "--queue", "lab", "--for", "Anna"]
    assert run(app, asked) == 0
    note, remedy = capsys.readouterr().out.splitlines()
    assert note.startswith("no other machine can join yet: ") and remedy == "computeshare up --lan"
    made: Any = command(capsys, *asked)  # which only this machine can use
    program, join_flag, link = made["command"].split()
    assert (program, join_flag) == ("computeshare-worker", "--join")
    with_uv, with_pipx = made["new_machine"]
    assert with_uv.startswith("uvx --from http://") and with_uv.endswith(f".whl {made['command']}")
    assert with_pipx.startswith("pipx run --spec http://") and with_pipx.endswith(f".whl {made['command']}")
    assert made["person"] == "Anna"
    joined = invite.join(link, "mac", tmp_path)
    assert joined.queue == "lab" and not joined.redis_url
    assert joined.gateway and joined.gateway.url == f"{client.url}/v1/gateway"
    assert invite.last_joined(Settings(home=tmp_path, redis_url=None)).gateway == joined.gateway


def test_invites_are_listed_and_withdrawn_at_the_command_line(
    client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    made = client.invites.create("lab", 15)
    assert command(capsys, "workers", "invites") == {"items": client.invites.list()}
    assert run(app, ["workers", "invites"]) == 0 and made["id"] in capsys.readouterr().out
    assert command(capsys, "workers", "withdraw", made["id"]) == {"id": made["id"], "withdrawn": True}
    assert made["id"] not in {one["id"] for one in client.invites.list()}


@pytest.mark.slow
def test_doctor_finds_the_control_plane_the_broker_and_torch(
    client: Client, redis_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMPUTESHARE_REDIS_URL", redis_url)
    with socket.create_server(("127.0.0.1", 0)) as proxy:  # so that nothing outside is asked for
        for name in ("http_proxy", "https_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
        run(app, ["doctor", "--json"])
    found = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    for name in ("python", "packages", "device", "home", "broker", "token", "clock", "data sets"):
        assert found[name]["status"] == "ok", found[name]
    assert "Valkey" in found["broker"]["finding"] or "Redis" in found["broker"]["finding"]
    assert "control plane" in found
