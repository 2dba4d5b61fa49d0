"""A machine without a checkout trains with the wheel that the control plane serves, and without the API's packages."""

import hashlib
import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from api.fleet.worker_wheel import CONTROL_PLANE_ONLY, FILE, PATH, project
from computeshare import __version__
from computeshare.up.embedded_broker import free_port
from tests.support.bare_venv import bare_venv, install
from tests.support.control_plane import DIGITS_MLP, ControlPlane

pytestmark = pytest.mark.e2e
PORT = free_port()
UP = ("--port", str(PORT), "--public-url", f"http://127.0.0.1:{PORT}")
LACKING = """
import importlib.util, json, sys
print(json.dumps([name for name in sys.argv[1:] if importlib.util.find_spec(name)]))
"""


@pytest.fixture(scope="module")
def python(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the served wheel, as `uvx` or `pipx` make one."""
    folder = tmp_path_factory.mktemp("machine")
    requirements: Any = project(__version__)["dependencies"]
    found = bare_venv(folder / "venv", requirements)
    wheel = folder / FILE
    wheel.write_bytes(plane.http.get(PATH, headers={"Authorization": ""}).raise_for_status().content)
    told = plane.http.get("/v1/worker/release", headers={"Authorization": ""}).json()
    assert (told["file"], told["version"], told["size"]) == (FILE, __version__, wheel.stat().st_size)
    assert told["sha256"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    install(found, wheel)
    return found


def test_the_environment_has_the_worker_and_no_package_of_the_control_plane(python: Path) -> None:
    worker = python.with_name("computeshare-worker")
    said = subprocess.run([worker, "--version"], capture_output=True, text=True, check=True, timeout=60, cwd="/")
    assert said.stdout == f"computeshare {__version__}\n"
    names = [name.replace("-", "_") for name in CONTROL_PLANE_ONLY] + ["api", "computeshare.up", "computeshare.cli"]
    command = [python, "-c", LACKING, *names]
    there = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, cwd="/")
    assert set(json.loads(there.stdout)) <= {"httpcore2", "jinja2"}  # which httpx2 and torch bring along


def test_it_joins_by_an_invite_and_trains_a_job_to_its_end(plane: ControlPlane, python: Path, tmp_path: Path) -> None:
    made = plane.http.post("/v1/invites", json={"queue": "wheel"}).json()
    line = shlex.split(made["new_machine"][0])
    assert line[:3] == ["uvx", "--from", f"http://127.0.0.1:{PORT}{PATH}"]
    program, *arguments = line[3:]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("COMPUTESHARE_", "PYTHON"))}
    command = [str(python.with_name(program)), *arguments, "--home", str(tmp_path)]
    with open(tmp_path / "worker.log", "wb") as log:
        worker = subprocess.Popen(command, env=kept, stdout=log, stderr=log, cwd=tmp_path)
    try:
        job = plane.finish(plane.create(**{**DIGITS_MLP, "queue": "wheel", "rounds": 40}))
        assert job["bytes_up"] > 0 and job["accuracy"] > 0.5

        def owner(*words: str) -> str:
            ask = [str(python.with_name(program)), *words, "--home", str(tmp_path)]
            return subprocess.run(ask, env=kept, capture_output=True, text=True, check=True, timeout=120).stdout

        def shown() -> Any:
            (one,) = json.loads(owner("status", "--json"))["workers"]
            return one["job"] and one["job"]["name"] == "birds" and one["moved"]["bytes_up"] > 0 and one

        long = {"queue": "wheel", "name": "birds", "rounds": 100_000, "evaluate_every": 0}
        job_id = plane.create(**{**DIGITS_MLP, **long})
        one = plane.until("its status", shown)
        assert one["job"]["id"] == job_id and one["state"] == "busy"
        assert (one["control_plane"], one["invite"]) == (f"http://127.0.0.1:{PORT}/v1/gateway", made["id"])
        assert owner("stop").startswith("stopped ") and worker.wait(5) == 6
        plane.http.post(f"/v1/jobs/{job_id}/cancel")
    finally:
        worker.kill()
        said = (tmp_path / "worker.log").read_text()
    assert "no sign of life" not in said and "broker away" not in said
