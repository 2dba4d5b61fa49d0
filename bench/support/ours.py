"""Trains a job on a new control plane, with workers on this machine's loopback or each behind a thin link."""

import contextlib
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.links import Link, Links
from bench.support.course import Course, Point
from bench.support.meter import Meter, metered
from computeshare.bundles.store import BundleStore
from computeshare.checkpoints.store import Artifacts
from computeshare.client import Client
from computeshare.jobspec.spec import JobSpec
from computeshare.runtime.processes import PARENT
from computeshare.transport.connections import connect
from computeshare.types import ENDED, Token
from computeshare.up.embedded_broker import free_port, stop_process
from computeshare.up.stack import Stack, UpOptions, running, wait_until_ready

QUEUE = "bench"
SEAT = "computeshare.worker.horse"
"""A word in the command line of a seat's process."""
LOOK_S = 0.5
LOOKS = 60
LONGEST_S = 3600.0
"""Time limit of a job without a limit of its own."""
START_S = 180.0
"""Time limit until the first worker joins."""


@dataclass(frozen=True, slots=True)
class Plane:
    """A control plane that is ready, with its workers."""

    stack: Stack
    client: Client
    data_dir: Path
    links: Links | None
    workers: tuple["subprocess.Popen[bytes]", ...] = ()

    @property
    def database(self) -> Path:
        return self.stack.settings.home / "computeshare.db"

    @property
    def bundles(self) -> BundleStore:
        """With the files of data sets that were added."""
        return BundleStore(self.stack.settings.bundles_dir)

    def pids(self) -> dict[str, list[int]]:
        """Process ids by role; a `seat` is the process in which a worker trains."""
        found = self.stack.pids()
        found.setdefault("worker", []).extend(worker.pid for worker in self.workers)
        for worker in found["worker"]:
            with contextlib.suppress(psutil.Error):
                seats = [child for child in psutil.Process(worker).children() if SEAT in child.cmdline()]
                found.setdefault("seat", []).extend(child.pid for child in seats)
        return found


@dataclass(frozen=True, slots=True)
class Front:
    """A proxy with TLS in front of the API: its address, the API's port, and the digest of the proxy's certificate."""

    url: str
    port: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Trained:
    """The results of a job. `busy`: by worker, the fraction of its time spent computing; `left`: why workers left."""

    course: Course
    status: str
    milliseconds: dict[str, float]
    busy: dict[str, float]
    left: list[str]
    job: dict[str, Any] = field(default_factory=dict)


@contextmanager
def plane(workers: int, data_dir: Path, links: Links | None = None, front: Front | None = None) -> Iterator[Plane]:
    """A control plane in a temporary folder until the end of the block; with links, a worker behind each link. With a
    front, which must run, the workers join through it by invites.
    """
    with tempfile.TemporaryDirectory() as home:
        options = UpOptions(
            port=front.port if front else free_port(),
            workers=0 if links or front else workers,
            queue=QUEUE,
            home=Path(home),
            public_url=front.url if front else None,
        )
        with running(options) as stack:
            wait_until_ready(stack, threading.Event())
            with Client(stack.url, stack.settings.resolve_token()) as client:
                started: tuple[subprocess.Popen[bytes], ...] = ()
                if front:
                    started = _join_workers(stack, client, front, workers, links, data_dir)
                elif links:
                    started = _start_workers(stack, links, data_dir)
                try:
                    yield Plane(stack, client, data_dir, links, started)
                finally:
                    _stop(started)


def add_data(plane: Plane, name: str, folder: Path) -> dict[str, Any]:
    """Add a folder as a data set, as a user does; returns the data set as the API has it."""
    command = [sys.executable, "-m", "computeshare.cli.main", "data", "add", name, str(folder)]
    where = ["--home", str(plane.stack.settings.home), "--json"]
    return dict(json.loads(subprocess.run([*command, *where], check=True, capture_output=True).stdout))


def _start_workers(stack: Stack, links: Links, data_dir: Path) -> tuple["subprocess.Popen[bytes]", ...]:
    """Start a worker behind each link; for these the embedded broker also listens on the links' address."""
    assert stack.broker is not None
    redis = connect(stack.broker.url)
    redis.config_set("bind", f"127.0.0.1 {links.host}")
    redis.close()
    url = stack.broker.tcp_url.replace("127.0.0.1", links.host)
    given = {"COMPUTESHARE_HOME": str(stack.settings.home), "COMPUTESHARE_REDIS_URL": url}
    log = stack.settings.home / "logs" / "worker.log"
    return tuple(
        _worker(["--queue", QUEUE, "--name", f"link-{number}"], given, data_dir, log, link)
        for number, link in enumerate(links.each, 1)
    )


def _join_workers(
    stack: Stack, client: Client, front: Front, count: int, links: Links | None, data_dir: Path
) -> tuple["subprocess.Popen[bytes]", ...]:
    """Start workers that take up an invite each, in homes of their own."""
    started = []
    for number in range(1, count + 1):
        home = stack.settings.home / f"joined-{number}"
        home.mkdir()
        flags = ["--join", client.invites.create(QUEUE, 60)["url"], "--tls-fingerprint", front.fingerprint]
        link = links.each[number - 1] if links else None
        started.append(_worker(flags, {"COMPUTESHARE_HOME": str(home)}, data_dir, home / "worker.log", link))
    return tuple(started)


def _worker(
    flags: list[str], given: dict[str, str], data_dir: Path, log: Path, link: Link | None
) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "COMPUTESHARE_DATA": str(data_dir), PARENT: str(os.getpid()), **given}
    command = [sys.executable, "-m", "computeshare.worker.process", *flags, "--child"]
    with open(log, "ab") as output:
        whole = link.inside(command) if link else command
        return subprocess.Popen(whole, env=environment, stdout=output, stderr=output, start_new_session=True)


def _stop(workers: tuple["subprocess.Popen[bytes]", ...]) -> None:
    threads = [threading.Thread(target=stop_process, args=(worker.pid,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for worker in workers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.wait(5)


def train(
    plane: Plane,
    document: dict[str, Any],
    limit_s: float | None = None,
    scored: bool = True,
    meanwhile: Callable[[str], None] = lambda job_id: None,
) -> Trained:
    """Train one job to its end, or for `limit_s` seconds after the first worker joined.

    If `scored`, versions with a checkpoint (`checkpoint_every`) are scored afterwards, outside of the measured time.
    `meanwhile` is called with the job's id in a thread of its own.
    Raises: RuntimeError: the job failed or did not end, or no worker joined.
    """
    with metered(plane.links) as meter:
        created = plane.client.create({"queue": QUEUE, **document})
        threading.Thread(target=meanwhile, args=(created["id"],), daemon=True).start()
        job = ended(plane.client, created["id"], limit_s)
    if job["status"] not in ("completed", "cancelled"):
        raise RuntimeError(f"the job is {job['status']}: {job['error']}")
    spec = JobSpec.model_validate_json(json.dumps(job["spec"]))
    with closing(sqlite3.connect(f"file:{plane.database}?mode=ro", uri=True)) as database:
        database.row_factory = sqlite3.Row
        points = _points(database, job["id"], meter)
        tokens = _column(database, "SELECT token FROM checkpoint WHERE job_id = ? AND NOT voided", job["id"])
        left = _column(database, "SELECT left_reason FROM worker_stat WHERE job_id = ?", job["id"])
        submissions = database.execute(
            "SELECT * FROM submission WHERE job_id = ? AND outcome = 'accepted' ORDER BY at_ms", [job["id"]]
        ).fetchall()
        laps = _column(database, "SELECT seconds FROM version WHERE job_id = ?", job["id"])
    accuracy = score(spec, plane, job["id"], [Token.parse(token) for token in tokens]) if scored else {}
    times = {**_worker_times(submissions), **_reducer_times(laps)}
    return Trained(Course(points, accuracy), job["status"], times, busy(submissions), [why for why in left if why], job)


def ended(client: Client, job_id: str, limit_s: float | None) -> dict[str, Any]:
    """Wait for the job's end; cancel it after `limit_s`. Raises RuntimeError: it does not end, or no worker joins."""
    deadline, began, cancelled = time.monotonic() + START_S, False, False
    while (job := client.show(job_id))["status"] not in ENDED:
        if not began and job["started_at"]:
            began, deadline = True, time.monotonic() + (limit_s or LONGEST_S)
        if time.monotonic() > deadline:
            if cancelled or (began and not limit_s):
                raise RuntimeError(f"job {job_id} does not end")
            job, cancelled, deadline = client.cancel(job_id), True, time.monotonic() + START_S
            if not began:
                raise RuntimeError(f"no worker joined the job within {START_S:.0f} s: {job['reason']}")
        time.sleep(LOOK_S)
    return _settled(client, job_id)


def _settled(client: Client, job_id: str) -> dict[str, Any]:
    """An ended job, once two reads in a row are equal: its last events may be stored after its end."""
    job = client.show(job_id)
    for _ in range(LOOKS):
        time.sleep(LOOK_S)
        before, job = job, client.show(job_id)
        if job == before:
            return dict(job)
    raise RuntimeError(f"job {job_id} ended, but what is told of it still changes")


def _points(database: sqlite3.Connection, job_id: str, meter: Meter) -> tuple[Point, ...]:
    query = "SELECT started_ms FROM job WHERE id = ?"
    (began_ms,) = database.execute(query, [job_id]).fetchone()
    query = (
        "SELECT version, at_ms, samples FROM version WHERE job_id = ? AND version > 0 AND NOT voided ORDER BY version"
    )
    points, samples = [], 0
    for row in database.execute(query, [job_id]):
        samples += row["samples"]
        moved = meter.between(began_ms / 1000, row["at_ms"] / 1000)
        points.append(Point(row["version"], (row["at_ms"] - began_ms) / 1000, samples, *moved))
    return tuple(points)


def _column(database: sqlite3.Connection, query: str, job_id: str) -> list[Any]:
    return [row[0] for row in database.execute(query, [job_id])]


def score(spec: JobSpec, plane: Plane, job_id: str, tokens: list[Token]) -> dict[int, float]:
    """Test accuracy of a job's checkpoints, by version."""
    from computeshare.tasks import metrics
    from computeshare.tasks.registry import task_of

    if not tokens:
        return {}
    artifacts = Artifacts(plane.stack.settings.artifacts_dir, job_id)
    judge = task_of(spec, plane.bundles).instance(spec.seed, "test", plane.data_dir)
    return {
        token.version: metrics.score(judge, judge.layout.gather(artifacts.tensors(token))).metrics["accuracy"]
        for token in tokens
        if token.version and artifacts.has(token)
    }


def busy(submissions: list[Any]) -> dict[str, float]:
    """By worker, the fraction of the time from first lease to last submission spent computing; rows ordered by time.

    The time of the first lease is estimated from the durations of the first submission; the download of the first
    weights is left out.
    """
    by_worker: dict[str, list[Any]] = {}
    for row in submissions:
        by_worker.setdefault(row["worker"], []).append(row)
    found = {}
    for worker, rows in by_worker.items():
        first = rows[0]["computing_s"] + rows[0]["encoding_s"] + rows[min(1, len(rows) - 1)]["uploading_s"]
        whole = (rows[-1]["at_ms"] - rows[0]["at_ms"]) / 1000 + first
        found[worker] = sum(row["computing_s"] for row in rows) / whole
    return found


def _worker_times(submissions: list[Any]) -> dict[str, float]:
    """Median milliseconds of a worker's steps, over submissions."""
    steps = ("waiting", "computing", "encoding", "uploading")
    medians = {step: statistics.median(row[f"{step}_s"] for row in submissions) for step in steps if submissions}
    return {f"worker {step}": round(1000 * seconds, 2) for step, seconds in medians.items()}


def _reducer_times(raw: list[str | None]) -> dict[str, float]:
    """Median milliseconds of the reducer's steps, over versions."""
    laps = [lap for lap in (json.loads(row or "null") for row in raw) if lap]
    names = laps[0] if laps else {}
    return {f"reducer {name}": round(1000 * statistics.median(lap[name] for lap in laps), 2) for name in names}
