"""A real `computeshare up` in a process of its own, and its REST API, for tests that need everything."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import httpx2
from redis import Redis
from redis.exceptions import RedisError

from computeshare.settings import RunFile
from computeshare.transport.connections import connect
from computeshare.up.embedded_broker import free_port

PATIENCE_S = 120.0
DIGITS_MLP: dict[str, Any] = {
    "dataset": "digits",
    "model": "mlp",
    "queue": "e2e",
    "micro_batch": 16,
    "micro_batches_per_round": 4,
    "optimizer": {"name": "SGD", "lr": 0.05, "momentum": 0.9},
}
"""A small job that learns quickly; how long it runs and what it keeps is for each test to say."""


class ControlPlane:
    """Talks to a running control plane and knows its processes."""

    def __init__(self, home: Path, process: subprocess.Popen[str], environment: dict[str, str]) -> None:
        self.home, self.process, self.environment = home, process, environment
        run = RunFile.read(home / "run.json")
        assert run is not None
        self.url = run.url
        token = (home / "token").read_text().strip()
        self.http = httpx2.Client(base_url=run.url, headers={"Authorization": f"Bearer {token}"}, timeout=30)

    def get(self, path: str, **parameters: Any) -> Any:
        response = self.http.get(path, params=parameters)
        assert response.status_code == 200, response.text
        return response.json()

    def create(self, **spec: Any) -> str:
        response = self.http.post("/v1/jobs", json={"threads": 1, **spec})
        assert response.status_code == 201, response.text
        return str(response.json()["id"])

    def job(self, job_id: str) -> dict[str, Any]:
        return dict(self.get(f"/v1/jobs/{job_id}"))

    def until(self, what: str, true: Callable[[], Any], patience_s: float = PATIENCE_S) -> Any:
        """Wait for something to become true; fails with its name."""
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            if found := true():
                return found
            assert self.process.poll() is None, "computeshare up ended"
            time.sleep(0.05)
        raise AssertionError(f"not within {patience_s:.0f} s: {what}; logs in {self.home / 'logs'}")

    def finish(self, job_id: str, timeout_s: float = 120) -> dict[str, Any]:
        """Wait until a job has ended; it must have completed."""
        ended = ("completed", "failed", "cancelled")
        job = self.until("the job's end", lambda: (j := self.job(job_id))["status"] in ended and j, timeout_s)
        assert job["status"] == "completed", job
        return dict(job)

    def reach(self, job_id: str, version: int) -> None:
        self.until(f"version {version}", lambda: self.job(job_id)["version"] >= version)

    def broker(self) -> Redis:
        """The broker, for its owner."""
        return connect((RunFile.read(self.home / "run.json") or _fail()).redis_url)

    def pids(self, role: str) -> list[int]:
        run = RunFile.read(self.home / "run.json")
        return run.pids.get(role, []) if run else []

    @contextmanager
    def worker(
        self,
        queue: str,
        name: str = "extra",
        *flags: str,
        home: Path | None = None,
        limit_bytes: int = 0,
        **variables: str,
    ) -> Iterator[subprocess.Popen[bytes]]:
        """One more worker, as a user starts it, here or on a machine with another `home`; ended with the block.

        `limit_bytes`: of the memory of each of its processes, by `ulimit -d`; 0: none.
        """
        command = [sys.executable, "-m", "computeshare.worker.process", "--queue", queue, "--name", name, *flags]
        if limit_bytes:
            command = ["sh", "-c", f'ulimit -d {limit_bytes // 1024}; exec "$@"', "sh", *command]
        log = self.home / "logs" / f"worker-{name}.log"
        run = RunFile.read(self.home / "run.json")
        there = {}
        if home and run:
            there = {"COMPUTESHARE_HOME": str(home), "COMPUTESHARE_REDIS_URL": run.redis_urls["worker"]}
        with open(log, "ab") as file:
            environment = self.environment | there | variables
            process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()


@contextmanager
def control_plane(home: Path, *flags: str, **variables: str) -> Iterator[ControlPlane]:
    """`computeshare up` until the end of the block, then Ctrl-C, after which nothing of it may be left."""
    environment = {**os.environ, "COMPUTESHARE_HOME": str(home), "OMP_NUM_THREADS": "1", **variables}
    environment.pop("COMPUTESHARE_REDIS_URL", None)
    command = [sys.executable, "-m", "computeshare.cli.main", "up", "--port", str(free_port()), *flags]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert "http://" in line, f"computeshare up said {line!r}; logs in {home / 'logs'}"
    pids = [pid for some in (RunFile.read(home / "run.json") or _fail()).pids.values() for pid in some]
    plane = ControlPlane(home, process, environment)
    try:
        yield plane
        if process.returncode == -signal.SIGKILL:  # by the test, which then looks for what is left
            return
        assert _refused(home) == []
        pids += [pid for role in ("worker", "reducer", "broker") for pid in plane.pids(role)]
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert [pid for pid in pids if _runs(pid)] == []
    finally:
        process.kill()


def _refused(home: Path) -> list[Any]:
    """The commands that the broker refused to its users."""
    run = RunFile.read(home / "run.json") or _fail()
    with suppress(RedisError), connect(run.redis_url, retries=0) as redis:  # it may be away
        found = cast(list[dict[str, Any]], redis.acl_log(50))
        return [(one["username"], one["object"], one["context"]) for one in found]
    return []


def _fail() -> RunFile:
    raise AssertionError("no run.json")


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
