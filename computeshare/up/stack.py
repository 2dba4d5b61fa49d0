"""`computeshare up`: every process of a control plane on this machine, watched and restarted."""

import contextlib
import fcntl
import json
import multiprocessing
import multiprocessing.util
import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any, Protocol

import psutil
import structlog

from computeshare.errors import SettingsError, SpecError, Unreachable
from computeshare.evaluator import process as evaluator
from computeshare.jobspec.spec import check_queue
from computeshare.reducer import process as reducer
from computeshare.runtime.database_file import CHECK_S
from computeshare.runtime.processes import PARENT, SOCKETS, stop_event
from computeshare.settings import EVERYWHERE, BrokerUser, RunFile, Settings, login_path
from computeshare.terminal.command import REMOVED
from computeshare.types import ENDED
from computeshare.up.embedded_broker import EmbeddedBroker, Place, can_listen, free_port, is_server, stop_process
from computeshare.up.lan_address import lan_address

READY_S = 120.0
SHORT_LIVES = 3
"""How often a process may end before the control plane is ready; a process that ends more often is taken for broken."""
WATCH_S = 0.1
START_S = 1.0
"""How long `Stack.stop` waits for a process that is being started."""
REDUCERS = 2
"""One active and one standby."""
FORKS = sys.platform != "darwin"
"""Whether reducers and evaluators come from a fork server; macOS's own libraries do not survive a fork."""
LONGEST_PAUSE_S = 10.0
"""The longest pause between two starts of a process that keeps ending."""
REDUCER_PAUSE_S = 1.0 if FORKS else LONGEST_PAUSE_S
"""The same of a reducer: less than a claim's life, so that one stands by when the claim of a killed one runs out, even
if that followed soon on another. Forked, it is there in milliseconds.
"""
BROKER_MEMORY = 0.5
"""The fraction of this machine's memory that the embedded broker may use."""
NAMELESS = (
    "That link is for this machine. With COMPUTESHARE_URL set to the address that others know it by, as "
    "http://studio.local:8000, links are for them, too."
)
INVITING = "computeshare workers invite prints the line for one"
_LOG_BYTES = 10_000_000
ROTATE_S = 5.0

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class UpOptions:
    """The options of `computeshare up`."""

    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 0
    queue: str = "default"
    home: Path | None = None
    public_url: str | None = None
    tls: str | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_port: int | None = None
    lan: bool = False
    person: str | None = None

    def settings(self) -> Settings:
        """The settings, with these options in place of variables. Raises SettingsError."""
        names = ("home", "public_url", "tls", "tls_cert", "tls_key", "tls_port", "person")
        settings = Settings.given(**{name: getattr(self, name) for name in names})
        if self.lan:
            settings = self._on_the_network(settings)
        public = settings.resolve_public_url()
        if (settings.tls or settings.tls_cert) and not (public and public.startswith("https:")):
            raise SettingsError(
                f"HTTPS needs an address: give --public-url https://NAME:{settings.tls_port}, by which other machines "
                "reach this one"
            )
        return settings

    def _on_the_network(self, settings: Settings) -> Settings:
        """The settings for machines on the same network: HTTPS with a certificate made here, which invites pin."""
        if self.public_url or self.tls_cert:
            raise SettingsError("--lan chooses address and certificate itself: leave out --public-url and --tls-cert")
        url = f"https://{lan_address()}:{settings.tls_port}"
        return settings.model_copy(update={"public_url": url, "tls": "self", "tls_cert": None, "tls_key": None})


class Handle(Protocol):
    """A started process; the part of `subprocess.Popen` that `Child` uses."""

    @property
    def pid(self) -> int | None: ...

    def poll(self) -> int | None: ...


class Forked:
    """A multiprocessing process with the interface of `Handle`; its output goes to `log_path`."""

    def __init__(self, target: Callable[[dict[str, str]], None], environment: dict[str, str], log_path: Path) -> None:
        made: dict[str, Any] = {"target": _logged, "args": (target, environment, str(log_path))}
        # A fork server imports torch once: the second reducer and every restart take milliseconds.
        if FORKS:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["computeshare.up.preload"])
            os.environ[SOCKETS] = multiprocessing.util.get_temp_dir()
            self._process: BaseProcess = context.Process(**made)
        else:
            self._process = multiprocessing.get_context("spawn").Process(**made)
        self._process.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        """Send SIGKILL and wait for the end."""
        self._process.kill()
        self._process.join()


def _end_fork_server() -> None:
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "multiprocessing.forkserver" in " ".join(child.cmdline()) and not child.children():
                child.terminate()


def _logged(target: Callable[[dict[str, str]], None], environment: dict[str, str], log_path: str) -> None:
    with open(log_path, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    target(environment)


@dataclass
class Child:
    """A process that is restarted whenever it ends; with `may_leave`, only until a user removes it."""

    role: str
    start: Callable[[], Handle]
    handle: Handle | None = None
    started: float = 0.0
    pause_s: float = 0.0
    starts: int = 0
    may_leave: bool = False
    longest_pause_s: float = LONGEST_PAUSE_S

    def ensure(self, now: float) -> bool:
        """Start the process if it is not running and its pause is over; True if it was started now."""
        if self.handle is not None and self.handle.poll() is None:
            return False
        if self.handle is not None and (self.has_left or now - self.started < self.pause_s):
            return False
        # Exponential backoff, reset after a run of more than 10 s.
        self.pause_s = 0.2 if now - self.started > 10 else min(self.longest_pause_s, 2 * self.pause_s + 0.2)
        self.handle, self.started = self.start(), now
        self.starts += 1
        return True

    @property
    def ends(self) -> int:
        """How often the process has ended unexpectedly; 0 for a process that may leave."""
        runs = self.handle is not None and self.handle.poll() is None
        return 0 if self.may_leave else self.starts - runs

    @property
    def has_left(self) -> bool:
        """Whether the process has ended because a user removed it, and not by a signal."""
        return self.may_leave and self.handle is not None and self.handle.poll() == REMOVED


def _end_of(log_path: Path, characters: int = 1000) -> str:
    """The last lines of a log."""
    try:
        with open(log_path, "rb") as file:
            file.seek(max(0, log_path.stat().st_size - characters))
            return file.read().decode(errors="replace").strip()
    except OSError as error:
        return f"(cannot be read: {error.strerror})"


@dataclass
class Stack:
    """The processes of one control plane."""

    settings: Settings
    options: UpOptions
    broker: EmbeddedBroker | None = None
    children: list[Child] = field(default_factory=list)
    redis_urls: dict[BrokerUser, str] = field(default_factory=dict)
    """The broker's address for each of its users; for the owner alone, if the broker is not ours."""
    _watching: threading.Lock = field(default_factory=threading.Lock)
    _stopped: bool = False
    _told: dict[str, list[int]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.options.host in EVERYWHERE else self.options.host
        return f"http://{host}:{self.options.port}"

    def login_url(self, url: str | None = None) -> str:
        """The link that logs a browser in; `url` is the control plane's address for the browser, default `self.url`."""
        return (url or self.url).rstrip("/") + login_path(self.settings.ensure_token())

    def start(self) -> None:
        """Start everything, `run.json` first."""
        settings = self.settings
        self._stop_leftovers()
        settings.database_file.require_whole(CHECK_S)
        settings.ensure_token()
        settings.ensure_signing_key()
        if settings.redis_url:
            self.redis_urls = {"owner": settings.redis_url}
        else:
            self._start_broker()
        self.children += self._describe_children()
        self._write_run_file()  # before the API can say that it is ready
        threading.Thread(target=self._keep, name="watch", daemon=True).start()

    def _keep(self) -> None:
        rotated_at = float("-inf")
        while not self._stopped:
            try:
                self.watch()
                if time.monotonic() - rotated_at > ROTATE_S:
                    rotated_at = time.monotonic()
                    rotate_logs(self.settings.home / "logs")
            except (OSError, EOFError) as error:  # a full disk, a dead fork server: the next turn tries again
                log.error("cannot look after the processes", error=str(error))
            time.sleep(WATCH_S)

    def watch(self) -> None:
        """Start the processes that are not running; keep `run.json` up to date."""
        with self._watching:
            if self._stopped:
                return
            now = time.monotonic()
            for child in self.children:
                if self._stopped:
                    return
                if child.ensure(now) or self.pids() != self._told:  # one was started, or has left
                    self._write_run_file()

    def _write_run_file(self) -> None:
        self._told = self.pids()
        others = {user: url for user, url in self.redis_urls.items() if user != "owner"}
        found = RunFile(url=self.url, redis_url=self.redis_urls["owner"], redis_urls=others, pids=self._told)
        found.write(self.settings.run_path)

    def pids(self) -> dict[str, list[int]]:
        """The process ids by role."""
        found = {"up": [os.getpid()]}
        for child in self.children:
            if child.handle and child.handle.pid and not child.has_left:
                found.setdefault(child.role, []).append(child.handle.pid)
        return found

    def is_ready(self) -> bool:
        """Whether `/readyz` answers 200: the API has everything it needs."""
        try:
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=2) as response:  # noqa: S310 - http(s) to this machine
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError, ValueError):
            return False

    def require_lives(self, ends: int) -> None:
        """Raises Unreachable, with the end of the log, if a process has ended more than `ends` times."""
        for child in self.children:
            if child.ends > ends:
                log_path = self._log(child.role)
                text = f"the {child.role} process ended {child.ends} time(s) before the control plane was ready"
                raise Unreachable(f"{text}. The end of {log_path}:\n{_end_of(log_path)}")

    def stop(self) -> None:
        """End every process: workers first, the broker last."""
        self._stopped = True
        if not self._watching.acquire(timeout=START_S):
            _end_fork_server()  # its imports take seconds, for which the start of a process waits
            self._watching.acquire()
        for role in ("worker", "evaluator", "reducer", "api"):
            pids = self.pids().get(role, [])
            threads = [threading.Thread(target=stop_process, args=(pid,)) for pid in pids]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if self.broker:
            self.broker.stop()
        self.settings.run_path.unlink(missing_ok=True)

    def _start_broker(self) -> None:
        home = self.settings.home
        data_dir = home / "broker" if self.settings.appendonly else None
        memory = int(BROKER_MEMORY * psutil.virtual_memory().total)
        self.broker = EmbeddedBroker.start(self._log("broker"), data_dir, Place.kept(home / "broker.json"), memory)
        self.redis_urls = self.broker.urls
        self.children.append(Child("broker", self._restart_broker, self.broker, time.monotonic()))

    def _restart_broker(self) -> Handle:
        """Start the broker again at the same place, so that all clients find it."""
        assert self.broker is not None
        print(f"the broker ended with code {self.broker.poll()}: restarting it", file=sys.stderr, flush=True)
        return self.broker.spawn()

    def _stop_leftovers(self) -> None:
        """Stop a broker left by a killed `up` whose watcher was killed too; all other processes end by themselves."""
        left = RunFile.read(self.settings.run_path)
        for pid in left.pids.get("broker", []) if left else []:
            if is_server(pid):
                stop_process(pid)

    def _describe_children(self) -> list[Child]:
        options = self.options
        api = [sys.executable, "-m", "api", "--child", "--host", options.host, "--port", str(options.port)]
        gateway_url = self.redis_urls.get("worker", self.settings.gateway_redis_url)
        environment = self._environment("api", recipes=True, gateway_redis_url=gateway_url)
        children = [Child("api", partial(self._spawn, api, environment, "api"))]
        worker = [sys.executable, "-m", "computeshare.worker.process", "--queue", options.queue, "--recipes", "--child"]
        for number in range(1, options.workers + 1):
            name = ["--name", f"worker-{number}"]
            start = partial(self._spawn, worker + name, self._environment("worker"), "worker")
            children.append(Child("worker", start, may_leave=True))
        for _ in range(REDUCERS):
            forked = partial(Forked, reducer.child, self._environment("reducer", recipes=True), self._log("reducer"))
            children.append(Child("reducer", forked, longest_pause_s=REDUCER_PAUSE_S))
        if self.settings.evaluator:
            environment = self._environment("evaluator", recipes=True)
            children.append(Child("evaluator", partial(Forked, evaluator.child, environment, self._log("evaluator"))))
        return children

    def _environment(self, user: BrokerUser, **more: object) -> dict[str, str]:
        """The variables of a process that logs in to the broker as `user`; `more`: further settings."""
        url = self.redis_urls.get(user, self.redis_urls["owner"])
        known = {"redis_url": url, "control_key": self.settings.ensure_signing_key().public, **more}
        return self.settings.model_copy(update=known).child_environment()

    def _spawn(self, command: list[str], environment: dict[str, str], role: str) -> Handle:
        with self._open_log(role) as file:
            # In a session of its own: Ctrl-C reaches only `up`, which ends the other processes in order.
            return subprocess.Popen(
                command,
                env={**os.environ, **environment, PARENT: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def _log(self, role: str) -> Path:
        path = self.settings.home / "logs" / f"{role}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _open_log(self, role: str) -> IO[bytes]:
        return open(self._log(role), "ab")


def rotate_logs(folder: Path, largest_bytes: int = _LOG_BYTES) -> None:
    """Copy each log larger than `largest_bytes` to `NAME.log.1` and truncate it.

    The file itself stays, as processes append to it. A line written between copying and truncating is lost.
    """
    for path in folder.glob("*.log"):
        if path.stat().st_size > largest_bytes:
            shutil.copyfile(path, path.with_suffix(".log.1"))
            os.truncate(path, 0)


@contextmanager
def running(options: UpOptions) -> Iterator[Stack]:
    """A started stack, stopped at the end of the block. Raises SettingsError if a stack runs on this home already."""
    settings = options.settings()
    try:
        settings.home.mkdir(parents=True, exist_ok=True)
        lock = open(settings.home / "up.lock", "w")  # noqa: SIM115 - closed below
    except OSError as error:
        raise SettingsError(
            f"{settings.home} cannot be written ({error.strerror}): name another folder by --home or COMPUTESHARE_HOME"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            run = RunFile.read(settings.run_path)
            where = f" at {run.url}" if run else ""
            raise SettingsError(
                f"`computeshare up` is already running on {settings.home}{where}: stop it with `computeshare down`, "
                "or choose another --home"
            ) from error
        stack = Stack(settings, options)
        try:
            stack.start()
            yield stack
        finally:
            stack.stop()


def wait_until_ready(stack: Stack, stop: threading.Event) -> None:
    """Wait until the control plane is ready, or `stop` is set.

    Raises Unreachable: a process keeps ending, or the control plane was not ready within two minutes.
    """
    deadline = time.monotonic() + READY_S
    while not stack.is_ready():
        if stop.wait(WATCH_S):
            return
        stack.require_lives(SHORT_LIVES)
        if time.monotonic() > deadline:
            stack.require_lives(0)
            raise Unreachable(f"the control plane did not become ready; look at {stack.settings.home / 'logs'}")


def up(options: UpOptions) -> int:
    """Run a control plane until a signal ends it; returns the exit code."""
    stop = stop_event()
    check_queue(options.queue)
    _check_port(options)
    with running(options) as stack:
        wait_until_ready(stack, stop)
        if not stop.is_set():
            print(f"ComputeShare is ready: {stack.login_url(stack.settings.url)}", flush=True)
            if options.lan:
                print(f"Machines on this network join at {stack.settings.public_url}: {INVITING}", flush=True)
            if options.host in EVERYWHERE and not stack.settings.url:
                print(NAMELESS, file=sys.stderr, flush=True)
        stop.wait()
    return 0


def down(settings: Settings) -> bool:
    """End the control plane that runs on this home, and wait for its end; False if none runs."""
    run = RunFile.read(settings.run_path)
    for pid in run.pids.get("up", []) if run else []:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if "computeshare" in " ".join(process.cmdline()):  # not another process that got the same id
                stop_process(pid, patience_s=30)
                return True
    return False


def _check_port(options: UpOptions) -> None:
    if not can_listen(options.host, options.port):
        raise SettingsError(f"cannot listen on {options.host}:{options.port}; try --port")


def demo_spec(dataset: str, workers: int) -> dict[str, object]:
    """The JobSpec of a small job that learns this data set in about a minute. Raises SpecError for an unknown name."""
    from computeshare.jobspec.catalog import catalog

    known = catalog().datasets
    if dataset not in known:
        raise SpecError(f"unknown dataset {dataset!r}; allowed: {', '.join(sorted(known))}")
    small = known[dataset].train < 10_000
    return {
        "name": f"demo: {dataset}",
        "queue": "demo",
        "dataset": dataset,
        "model": "mlp" if small else "lenet5",
        "micro_batch": 32,
        "micro_batches_per_round": max(2, min(4, workers)),
        "epochs": 20 if small else 2,
        "optimizer": {"name": "SGD", "lr": 0.05 if small else 0.02, "momentum": 0.9},
        "workers": {"min": 1, "max": max(1, workers)},
        "threads": 1,
        "evaluate_every": 200,
    }


def demo(dataset: str, workers: int) -> int:
    """Run everything on this machine: train `dataset`, show progress, print one line of JSON; returns the exit code."""
    from computeshare.client import Client
    from computeshare.jobspec.spec import JobSpec
    from computeshare.terminal.watch import watch_job

    started = time.monotonic()
    spec = JobSpec.model_validate(demo_spec(dataset, workers))
    home = Settings().home / "demo"
    stop = stop_event()
    with running(UpOptions(port=free_port(), workers=workers, queue="demo", home=home)) as stack:
        print("starting: broker, API, two reducers, evaluator, workers ...", file=sys.stderr, flush=True)
        wait_until_ready(stack, stop)
        client = Client(stack.url, stack.settings.resolve_token())
        job = client.create(spec.model_dump(mode="json", exclude_unset=True))
        page = f"{stack.url}/jobs/{job['id']}"
        print(f"the job's page: {stack.login_url()}&next=/jobs/{job['id']}", file=sys.stderr, flush=True)
        job = watch_job(client, job["id"], stop)
        if job["status"] not in ENDED:  # interrupted: the next demo is not to wait for this one
            job = client.cancel(job["id"])
        accuracy, status = job["accuracy"], job["status"]
        print(f"{status}: test accuracy {accuracy:.2%}" if accuracy is not None else f"{status}: {job['error']}")
        seconds = round(time.monotonic() - started, 1)
        line = {"status": status, "accuracy": accuracy, "seconds": seconds, "workers": workers, "url": page}
        print(json.dumps(line), flush=True)
    return 0 if status == "completed" else 1
