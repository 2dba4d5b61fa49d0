"""A control plane and its workers as real processes, each recognizable by a mark in its environment."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import psutil
from redis import Redis
from redis.exceptions import RedisError

from computeshare.protocol.keys import JobKeys
from computeshare.protocol.round_store import RoundState, RoundStore
from computeshare.runtime.failpoints import VARIABLE as FAILPOINTS
from computeshare.settings import RunFile
from computeshare.types import ENDED
from computeshare.up.embedded_broker import free_port

MARK = "COMPUTESHARE_STAGE"
PATIENCE_S = 120.0


class Stage:
    """`computeshare up`, and workers started separately; `tend` restarts dead workers.

    A stage kills only its own processes.
    """

    def __init__(self, home: Path, workers: int, queue: str = "chaos", **environment: str) -> None:
        self.home, self.queue = home, queue
        self.failpoints = home / "failpoints"
        self.failpoints.mkdir(parents=True)
        self.mark = secrets.token_hex(8)
        own = {MARK: self.mark, "COMPUTESHARE_HOME": str(home), FAILPOINTS: str(self.failpoints)}
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", **own, **environment}
        self.environment.pop("COMPUTESHARE_REDIS_URL", None)
        command = [sys.executable, "-m", "computeshare.cli.main", "up", "--port", str(free_port()), "--queue", queue]
        self.up = subprocess.Popen(command, env=self.environment, stdout=subprocess.PIPE, text=True)
        self.workers: list[subprocess.Popen[bytes]] = []
        assert self.up.stdout is not None
        line = self.up.stdout.readline()
        if "http://" not in line:
            self.up.kill()
            raise RuntimeError(f"computeshare up said {line!r}; logs in {home / 'logs'}")
        token = (home / "token").read_text().strip()
        self._http = httpx2.Client(
            base_url=self.run_file().url, headers={"Authorization": f"Bearer {token}"}, timeout=10, trust_env=False
        )
        self.redis = Redis.from_url(self.run_file().redis_url, socket_timeout=2, retry=None)
        self.workers = [self.start_worker(number) for number in range(workers)]

    def run_file(self) -> RunFile:
        found = RunFile.read(self.home / "run.json")
        assert found is not None, "computeshare up is gone"
        return found

    # REST, with retries while the API is down

    def call(self, method: str, path: str, **content: Any) -> Any:
        """Call the API; returns the answer's document. Raises TimeoutError: no answer; ValueError: a refusal."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx2.HTTPError):
                answer = self._http.request(method, path, **content)
                if answer.status_code < 400:
                    return answer.json()
                if answer.status_code < 500:
                    raise ValueError(f"{method} {path}: {answer.text}")
            time.sleep(0.1)
        raise TimeoutError(f"{method} {path}: no answer for {PATIENCE_S:.0f} s; logs in {self.home / 'logs'}")

    def create(self, spec: dict[str, Any]) -> str:
        key = {"Idempotency-Key": secrets.token_hex(16)}
        return str(self.call("POST", "/v1/jobs", json={"queue": self.queue, **spec}, headers=key)["id"])

    def job(self, job_id: str) -> dict[str, Any]:
        return dict(self.call("GET", f"/v1/jobs/{job_id}"))

    def ledger(self, job_id: str) -> list[dict[str, Any]]:
        return list(self.call("GET", f"/v1/jobs/{job_id}/ledger")["epochs"])

    def finish(self, job_id: str, patience_s: float, every: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Wait for the job's end in any status, and return the job. Raises TimeoutError."""
        deadline = time.monotonic() + patience_s
        while (job := self.job(job_id))["status"] not in ENDED:
            if time.monotonic() > deadline:
                raise TimeoutError(f"not ended after {patience_s:.0f} s: {job}; logs in {self.home / 'logs'}")
            every()
            time.sleep(0.1)
        return job

    def rounds(self, job_id: str) -> RoundState | None:
        """The round's state in the broker; None without a round, or while the broker is away."""
        with contextlib.suppress(RedisError):
            return RoundStore(self.redis, job_id).read()
        return None

    # Processes

    def process(self, role: str) -> psutil.Process | None:
        """The first process that `computeshare up` runs in this role."""
        for pid in self.run_file().pids.get(role, []):
            if found := alive(pid):
                return found
        return None

    def active_reducer(self, job_id: str) -> psutil.Process | None:
        with contextlib.suppress(RedisError):
            claim: Any = self.redis.get(JobKeys(job_id).reducer())
            return alive(int(claim.split(b"|")[2])) if claim else None
        return None

    def fork_server(self) -> psutil.Process | None:
        """The process from which reducers and evaluators are forked; they end with it."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.up.pid).children():
                if "multiprocessing.forkserver" in " ".join(child.cmdline()):
                    return child
        return None

    def worker_processes(self) -> list[psutil.Process]:
        return [found for worker in self.workers if worker.poll() is None and (found := alive(worker.pid))]

    def seats(self) -> list[psutil.Process]:
        """The processes of seats, without a worker's other, short-lived children."""
        found = []
        for worker in self.worker_processes():
            with contextlib.suppress(psutil.Error):
                found += [child for child in worker.children() if "computeshare.worker.horse" in child.cmdline()]
        return found

    def tend(self) -> None:
        """Restart dead workers. Raises RuntimeError: `computeshare up` ended."""
        if self.up.poll() is not None:
            raise RuntimeError(f"computeshare up ended with {self.up.returncode}; logs in {self.home / 'logs'}")
        for number, worker in enumerate(self.workers):
            if worker.poll() is not None:
                self.workers[number] = self.start_worker(number)

    def start_worker(self, number: int, **environment: str) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            "computeshare.worker.process",
            "--queue",
            self.queue,
            "--name",
            f"hand-{number}",
        ]
        with open(self.home / "logs" / "hands.log", "ab") as log:
            given = {**self.environment, **environment}
            return subprocess.Popen(command, env=given, stdout=log, stderr=log, start_new_session=True)

    def orphans(self, patience_s: float = 10.0) -> list[str]:
        """Processes with this stage's mark whose ancestors have ended, if they are still there after `patience_s`."""
        deadline = time.monotonic() + patience_s
        while found := self._orphans():
            if time.monotonic() > deadline:
                return [f"{process.pid} {' '.join(process.cmdline())[:120]}" for process in found]
            time.sleep(0.1)
        return []

    def _orphans(self) -> list[psutil.Process]:
        known = {self.up.pid, *(worker.pid for worker in self.workers)}
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) != self.mark or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if not known & {process.pid, *(parent.pid for parent in process.parents())}:
                    found.append(process)
        return found

    def stop(self) -> int:
        """End all processes as a user would; returns the exit code of `computeshare up`."""
        for worker in self.workers:
            if worker.poll() is None:
                worker.terminate()
        for worker in self.workers:
            _end(worker)
        if self.up.poll() is None:
            self.up.send_signal(signal.SIGINT)
        _end(self.up)
        self._http.close()
        self.redis.close()
        return self.up.returncode


def _end(process: subprocess.Popen[Any]) -> None:
    """Wait for a process to end; kill it after 30 s."""
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def alive(pid: int) -> psutil.Process | None:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return process if process.status() != psutil.STATUS_ZOMBIE else None
    return None


@contextmanager
def stage(home: Path, workers: int, **named: str) -> Iterator[Stage]:
    """A stage that runs until the end of the block."""
    made = Stage(home, workers, **named)
    try:
        yield made
    finally:
        made.stop()
