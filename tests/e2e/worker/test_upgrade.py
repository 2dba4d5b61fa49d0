"""A worker from a wheel of another version becomes the control plane's version, if its owner agrees, and trains."""

import os
import shlex
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from api.fleet.worker_wheel import build, project
from computeshare import __version__
from computeshare.terminal.command import OTHER_VERSION
from computeshare.up.embedded_broker import free_port
from tests.support.bare_venv import bare_venv, install
from tests.support.control_plane import DIGITS_MLP, ControlPlane, control_plane

pytestmark = pytest.mark.e2e
PORT = free_port()
UP = ("--port", str(PORT), "--public-url", f"http://127.0.0.1:{PORT}")
ROOT = Path(__file__).resolve().parents[3]
UV = Path(str(metadata.distribution("uv").locate_file("../../../bin/uv"))).resolve()


def checkout(folder: Path, version: str) -> Path:
    """A copy of the code that says that it is of this version."""
    for name in ("computeshare", "api", "migrations"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "alembic.ini", folder)
    start = folder / "computeshare" / "__init__.py"
    start.write_text(start.read_text().replace(f'__version__ = "{__version__}"', f'__version__ = "{version}"'))
    return folder


def machine(folder: Path, version: str) -> Path:
    """An environment with a wheel of this version, whose code is of this version; its `computeshare-worker`."""
    source = checkout(folder / "source", version)
    requirements: Any = project(version)["dependencies"]
    python = bare_venv(folder / "venv", requirements)
    wheel = folder / f"computeshare_worker-{version}-py3-none-any.whl"
    wheel.write_bytes(build(version, source))
    install(python, wheel)
    worker = python.with_name("computeshare-worker")
    assert version_of(worker) == f"computeshare {version}\n"
    return worker


def version_of(worker: Path) -> str:
    return subprocess.run(
        [worker, "--version"], capture_output=True, text=True, check=True, cwd="/", timeout=120
    ).stdout


def started(
    plane: ControlPlane, worker: Path, queue: str, home: Path, *flags: str, **more: str
) -> "subprocess.Popen[bytes]":
    """The invited worker, with its log in `home`."""
    made = plane.http.post("/v1/invites", json={"queue": queue}).json()
    arguments = shlex.split(made["command"])[1:]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("COMPUTESHARE_", "PYTHON", "UV"))}
    environment = {**kept, "UV": str(UV), "UV_OFFLINE": "1"} | more
    home.mkdir()
    with open(home / "log", "wb") as log:
        command = [str(worker), *arguments, "--home", str(home), "--name", queue, *flags]
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=home)


@pytest.mark.parametrize(
    ("version", "said"), [("0.0.9", "upgrading from"), ("0.9.0", "the control plane is older: going back from")]
)
def test_a_worker_of_another_version_becomes_the_control_planes_if_its_owner_agrees(
    plane: ControlPlane, tmp_path: Path, version: str, said: str
) -> None:
    worker, queue = machine(tmp_path, version), f"v{version[2]}"
    refused = started(plane, worker, queue, tmp_path / "refused")
    assert refused.wait(120) == OTHER_VERSION and version_of(worker) == f"computeshare {version}\n"
    assert "--upgrade" in (tmp_path / "refused" / "log").read_text()

    broken = started(plane, worker, queue, tmp_path / "broken", COMPUTESHARE_UPGRADE="true", UV="/bin/false")
    assert broken.wait(120) == OTHER_VERSION and version_of(worker) == f"computeshare {version}\n"
    assert "cannot be installed" in (tmp_path / "broken" / "log").read_text()

    process = started(plane, worker, queue, tmp_path / "home", "--upgrade")
    try:
        job = plane.finish(plane.create(**{**DIGITS_MLP, "queue": queue, "rounds": 20, "evaluate_every": 0}))
        assert job["bytes_up"] > 0
    finally:
        process.terminate()
        assert process.wait(20) == 0
    log = (tmp_path / "home" / "log").read_text()
    assert said in log and version_of(worker) == f"computeshare {__version__}\n"


def test_a_running_worker_follows_an_upgrade_of_the_control_plane_however_long_that_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, home, port = machine(tmp_path, "0.0.9"), tmp_path / "plane", free_port()
    flags = ("--port", str(port), "--public-url", f"http://127.0.0.1:{port}")
    slow = tmp_path / "slow-uv"
    slow.write_text(f'#!/bin/sh\nsleep 4\nexec {UV} "$@"\n')
    slow.chmod(0o755)
    job = {**DIGITS_MLP, "queue": "later", "rounds": 5, "evaluate_every": 0}
    monkeypatch.chdir(tmp_path / "source")  # where Python finds the older control plane's code first
    with control_plane(home, *flags) as older:
        assert older.get("/v1/worker/release")["version"] == "0.0.9"
        process = started(older, worker, "later", tmp_path / "home", "--upgrade", UV=str(slow))
        older.finish(older.create(**job))
    monkeypatch.chdir(ROOT)
    try:
        with control_plane(home, *flags) as newer:
            assert newer.get("/v1/worker/release")["version"] == __version__
            newer.finish(newer.create(**job))
            assert process.poll() is None and version_of(worker) == f"computeshare {__version__}\n"
    finally:
        process.terminate()
        assert process.wait(20) == 0
