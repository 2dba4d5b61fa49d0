"""A recipe's job on a machine that joined through the gateway: it runs signed code, and no secret of either side is
found where others could read it.
"""

import contextlib
import os
import sqlite3
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from redis import Redis

from computeshare import ComputeShare
from computeshare.settings import RunFile, derive
from computeshare.up.embedded_broker import free_port
from tests.e2e.jobs.test_recipes import DIGITS, FIELDS
from tests.support.control_plane import ControlPlane

pytestmark = pytest.mark.e2e
PORT = free_port()
UP = ("--port", str(PORT), "--public-url", f"http://127.0.0.1:{PORT}")
PAGES = ("/", "/workers", "/jobs/{job}", "/tokens", "/audit", "/queues", "/webhooks", "/jobs/new", "/datasets")
DOCUMENTS = (
    "/v1/invites",
    "/v1/workers",
    "/v1/jobs/{job}",
    "/v1/jobs/{job}/logs",
    "/v1/audit",
    "/v1/tokens",
    "/metrics",
)
OWN_FILES = {"token", "run.json", "broker.json", "control.key", "joined.json"}
"""The files, readable by their owner alone, that hold secrets."""


def test_a_joined_machine_runs_signed_recipes_and_no_secret_leaves_its_place(
    plane: ControlPlane, tmp_path: Path
) -> None:
    made = plane.http.post("/v1/invites", json={"queue": "far", "days": 1}).json()
    code = made["url"].rpartition("/")[2]
    reader = plane.http.post("/v1/tokens", json={"name": "canary", "scopes": ["jobs:read"]}).json()["token"]
    there = tmp_path / "there"
    there.mkdir()
    recipe = tmp_path / "digits.py"
    recipe.write_text(DIGITS)
    link = f"http://127.0.0.1:{urlsplit(plane.url).port}#{code}"
    known = {name: value for name, value in os.environ.items() if not name.startswith("COMPUTESHARE_")}
    with open(there / "worker.log", "wb") as log:
        join = ["--join", link, "--home", str(there), "--recipes", "--unconfined"]
        command = [sys.executable, "-m", "computeshare.worker.process", *join]
        worker = subprocess.Popen(command, env=known, stdout=log, stderr=log)
    try:
        token = (plane.home / "token").read_text().strip()
        session = ComputeShare(plane.url, token)
        job = session.jobs.create(FIELDS | {"queue": "far", "evaluate_every": 5}, recipe=str(recipe)).id
        plane.reach(job, 10)
        running = arguments(plane, worker.pid)
        plane.finish(job)
        secrets = held(plane, there, token) | {"a reader's token": reader}
        found = {
            "logs": b"".join(path.read_bytes() for path in [*(plane.home / "logs").iterdir(), there / "worker.log"]),
            "arguments": running,
            "pages": b"".join(plane.http.get(path.format(job=job)).content for path in (*PAGES, *DOCUMENTS)),
            "database": dumped(plane.home / "computeshare.db"),
            "broker": written(plane),
            "files": others(plane.home) + others(there),
        }
    finally:
        worker.terminate()
        worker.wait(20)
    assert all(len(place) > 100 for place in found.values()) and len(secrets) == 10
    leaks = [f"{name} in {where}" for name, text in secrets.items() for where in found if text.encode() in found[where]]
    assert leaks == []
    spent = [where for where, place in found.items() if code.encode() in place]
    assert spent == ["arguments"], "the invite's code, which works once"


def held(plane: ControlPlane, there: Path, token: str) -> dict[str, str]:
    """The secrets of the control plane and of the machine."""
    [machine] = (there / "machine-keys").iterdir()
    run = RunFile.read(plane.home / "run.json")
    assert run is not None
    return {
        "the owner's token": token,
        "the key of the login link": derive(token, "login"),
        "the control plane's key": (plane.home / "control.key").read_text().strip(),
        "the machine's key": machine.read_text().strip(),
        "the owner's password of the broker": urlsplit(run.redis_url).password or "",
        **{f"the password of {user}": urlsplit(url).password or "" for user, url in run.redis_urls.items()},
    }


def arguments(plane: ControlPlane, worker: int) -> bytes:
    """The command lines of all processes of the control plane and of the worker."""
    roots = [psutil.Process(plane.process.pid), psutil.Process(worker)]
    lines = []
    for one in (each for root in roots for each in (root, *root.children(recursive=True))):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            lines.append(" ".join(one.cmdline()))
    assert len(lines) > 6
    return "\n".join(lines).encode()


def dumped(path: Path) -> bytes:
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
        return "\n".join(database.iterdump()).encode()


def written(plane: ControlPlane) -> bytes:
    """All keys of the broker, with their values."""
    run = RunFile.read(plane.home / "run.json")
    assert run is not None
    redis: Any = Redis.from_url(run.redis_url)
    keys = list(redis.scan_iter(count=1000))
    assert any(key.startswith(b"rq:") for key in keys)
    return b"\n".join(part for key in keys for part in (key, redis.dump(key) or b"", *read(redis, key)))


def read(redis: Any, key: bytes) -> list[bytes]:
    """A small key's fields and values as they are, which a dump may hold compressed."""
    match redis.type(key):
        case b"hash":
            return [part for pair in redis.hgetall(key).items() for part in pair]
        case b"string":
            return [redis.get(key) or b""]
        case b"stream":
            return [part for _, fields in redis.xrange(key) for pair in fields.items() for part in pair]
    return []


def others(home: Path) -> bytes:
    """All files but those that are meant to hold secrets, which nobody else may read."""
    paths = [path for path in home.rglob("*") if path.is_file()]
    private = [path for path in paths if path.name in OWN_FILES or path.parent.name == "machine-keys"]
    assert private and all(path.stat().st_mode & 0o077 == 0 for path in private)
    found = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # a checkpoint that a newer one replaced meanwhile
            found += [path.read_bytes()] if path not in private else []
    return b"".join(found)
