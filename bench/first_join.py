"""Measures how long a machine with `uv` and nothing else takes to join, and to its first counted samples.

    python -m bench.first_join [--runs 3]

The machine is a network namespace from which only one HTTPS port of this machine can be reached, that of `up --tls
self`, and no package index. Its package cache is warm (UV_OFFLINE): the packages are there, the worker's wheel and
environment are not. It runs the line of an invite, two commands: `curl` and `uvx`. Needs Linux and root.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from bench.links import Link, Shape, links
from bench.stage import Stage
from bench.support.report import Part, Table, markdown
from bench.support.wait import wait_until
from computeshare.up.embedded_broker import free_port

QUEUE = "newcomer"
GOAL_S, PATIENCE_S = 120.0, 600.0
JOB: dict[str, Any] = {
    "dataset": "digits",
    "model": "mlp",
    "queue": QUEUE,
    "micro_batch": 16,
    "micro_batches_per_round": 4,
    "rounds": 20,
    "threads": 1,
    "evaluate_every": 0,
}
REACHES = """
import json, socket, sys
def reached(host, port):
    try:
        socket.create_connection((host, port), 3).close()
    except OSError:
        return False
    return True
print(json.dumps([reached(host, int(port)) for host, port in (each.rsplit(":", 1) for each in sys.argv[1:])]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    found = [measure() for _ in range(options.runs)]
    print(markdown(Part([table(found)])))
    sys.exit(max(one["trained_s"] for one in found) > GOAL_S)


def table(found: Sequence[dict[str, Any]]) -> Table:
    """One row per run."""
    columns = ("run", "commands", "joined after (s)", "first version after (s)", "bytes up", "bytes down")
    rows = [
        (number, one["commands"], one["joined_s"], one["trained_s"], one["up"], one["down"])
        for number, one in enumerate(found, 1)
    ]
    return Table("From a machine without ComputeShare", columns, rows, "Bytes of the machine's one link, in frames.")


def measure() -> dict[str, Any]:
    """One control plane, one new machine, one job."""
    with tempfile.TemporaryDirectory() as name, links(1, Shape()) as net:
        folder, (link,), port = Path(name), net.each, free_port()
        public = {"PUBLIC_URL": f"https://{net.host}:{port}", "TLS": "self", "TLS_PORT": str(port)}
        stage = Stage(folder / "home", 0, QUEUE, **{f"COMPUTESHARE_{key}": value for key, value in public.items()})
        try:
            plain = stage.run_file().url.rpartition(":")[2]
            told = _run(link.inside([sys.executable, "-c", REACHES, f"{net.host}:{port}", f"{net.host}:{plain}"]))
            assert json.loads(told) == [True, False], "the machine reaches more than the one port"
            return _joined(stage, link, folder)
        finally:
            stage.stop()


def _joined(stage: Stage, link: Link, folder: Path) -> dict[str, Any]:
    warm(stage, folder)
    job_id = stage.create(JOB)
    made = stage.call("POST", "/v1/invites", json={"queue": QUEUE})
    line = made["new_machine"][0]
    began, before = time.monotonic(), link.moved()
    with machine(link, line, folder) as process:

        def has_joined() -> bool:
            if process.poll() is not None:
                raise RuntimeError(f"the machine's line ended with code {process.returncode}")
            return bool(stage.call("GET", f"/v1/invites/{made['id']}")["status"] == "joined")

        wait_until(has_joined, "the machine to join", PATIENCE_S)
        joined_s = time.monotonic() - began
        wait_until(lambda: stage.job(job_id)["version"] > 0, "the first version", PATIENCE_S)
        trained_s = time.monotonic() - began
        moved = link.moved()
    up, down = moved.up - before.up, moved.down - before.down
    return {"commands": len(line.split(" && ")), "joined_s": joined_s, "trained_s": trained_s, "up": up, "down": down}


def warm(stage: Stage, folder: Path) -> None:
    """Fill this user's package cache with what the wheel requires, by an installation that is thrown away."""
    release = stage.call("GET", "/v1/worker/release")
    wheel = folder / release["file"]
    wheel.write_bytes(httpx2.get(f"{stage.run_file().url}/v1/worker/{wheel.name}").content)
    uv = [sys.executable, "-m", "uv", "--quiet"]
    _run([*uv, "venv", str(folder / "thrown-away")])
    _run([*uv, "pip", "install", "--python", str(folder / "thrown-away"), str(wheel)])
    shutil.rmtree(folder / "thrown-away")


@contextmanager
def machine(link: Link, line: str, folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A machine with a home of its own that runs this line, until the end of the block."""
    home = folder / "machine"
    home.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("COMPUTESHARE_", "PYTHON"))}
    tools = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    cache = os.environ.get("UV_CACHE_DIR") or _run([sys.executable, "-m", "uv", "cache", "dir"]).strip()
    own = {"HOME": str(home), "XDG_DATA_HOME": str(home / "data"), "PATH": tools, "UV_CACHE_DIR": cache}
    own["UV_OFFLINE"] = "1"
    with open(home / "log", "wb") as log:
        process = subprocess.Popen(link.inside(["sh", "-c", line]), env=kept | own, stdout=log, stderr=log, cwd=home)
    try:
        yield process
    except BaseException:
        sys.stderr.write((home / "log").read_text()[-4000:])
        raise
    finally:
        process.terminate()
        process.wait(60)


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
