"""`computeshare doctor`: what this machine has, what it reaches, and what to do about the rest.

A check looks at one thing and returns a `Check`; it changes nothing. What needs torch runs in a process of its own
(`commands/probe.py`): importing torch takes seconds, and may fail in ways that end a process.
"""

import json
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from email.utils import parsedate_to_datetime
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import psutil
from redis.exceptions import RedisError
from rich.table import Table
from rich.text import Text

from computeshare import __version__
from computeshare.broker import connect
from computeshare.catalog import catalog
from computeshare.client import Client
from computeshare.commands.output import duration, plain, size
from computeshare.errors import ApiError, ComputeShareError, SettingsError
from computeshare.settings import RunFile, Settings

PROBE_S = 180.0
SKEW_S = 5.0
DISK_WARN, DISK_FAIL = 5_000_000_000, 500_000_000
_PACKAGES = ("torch", "torchvision", "numpy", "redis", "rq", "pydantic", "fastapi", "safetensors")
_OLDEST_BROKER = (6, 2)  # XTRIM MINID
_LOOKS = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "fail": ("✗", "red")}


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at: what was found, and what to do where it is not well."""

    name: str
    status: Literal["ok", "warn", "fail"]
    finding: str
    advice: str = ""

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True)
class Machine:
    """What the checks look at; whatever is slow to find out is found out once."""

    settings: Settings
    port: int

    @cached_property
    def run(self) -> RunFile | None:
        return RunFile.read(self.settings.run_path)

    @cached_property
    def probe(self) -> dict[str, Any]:
        """What a process with torch found (see `commands/probe.py`), or `{"error": ...}`."""
        command = [sys.executable, "-m", "computeshare.commands.probe", str(self.settings.data_dir)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S, check=False)
            return dict(json.loads(done.stdout.splitlines()[-1]))
        except subprocess.TimeoutExpired:
            return {"error": f"torch was not there after {PROBE_S:.0f} s"}
        except (ValueError, IndexError, OSError):
            return {"error": (done.stderr.splitlines() or ["it died without a word"])[-1]}

    @cached_property
    def client(self) -> Client:
        """Raises SettingsError where no control plane is known."""
        url = self.settings.resolve_url()
        try:
            return Client(url, self.settings.resolve_token())
        except SettingsError:
            return Client(url)

    @cached_property
    def readiness(self) -> tuple[dict[str, Any], Mapping[str, str], float]:
        """What `/readyz` says, the answer's headers, and this machine's time then. Raises ComputeShareError."""
        before = time.time()
        document, headers = self.client.ready()
        return document, headers, (before + time.time()) / 2


def python(_: Machine) -> Check:
    found = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if (3, 11) <= sys.version_info[:2] < (3, 14):
        return Check("python", "ok", found)
    return Check("python", "fail", found, "use Python 3.11, 3.12 or 3.13")


def packages(_: Machine) -> Check:
    versions: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            return Check(
                "packages", "fail", f"{name} is not installed", "install computeshare again, with all it needs"
            )
    found = f"computeshare {__version__}, " + ", ".join(f"{name} {version}" for name, version in versions.items())
    if not versions["rq"].startswith("3.0."):
        return Check("packages", "fail", found, "rq must be 3.0.*: install computeshare again")
    if versions["torch"].split("+")[0].split(".")[:2] != catalog().torch.split(".")[:2]:
        advice = f"jobs are checked against torch {catalog().torch}: same bits need the same version on all workers"
        return Check("packages", "warn", found, advice)
    return Check("packages", "ok", found)


def device(machine: Machine) -> Check:
    from computeshare.training.devices import guess

    probe = machine.probe
    if error := probe.get("error"):
        return Check("device", "fail", str(error), "install torch and torchvision again, as one pair of versions")
    found = f"{probe['device']}, {probe['threads']} threads; torch loads in {probe['seconds']:.0f} s"
    if guess() == "cuda" and not probe["device"].startswith("cuda"):
        return Check("device", "warn", found, "torch cannot use the NVIDIA device here: look at driver and CUDA build")
    if trouble := probe["torchvision"]:
        return Check("device", "warn", f"{found}; torchvision: {trouble}", "install torchvision for this torch")
    return Check("device", "ok", found)


def home(machine: Machine) -> Check:
    folder = machine.settings.home
    existing = _existing(folder)
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        advice = "make it writable, or set COMPUTESHARE_HOME to a folder that is"
        return Check("home", "fail", f"{existing}: {error.strerror}", advice)
    return Check("home", "ok", f"{folder} is writable" if folder.is_dir() else f"{folder} can be made")


def disk(machine: Machine) -> Check:
    free = shutil.disk_usage(_existing(machine.settings.home)).free
    status: Literal["ok", "warn", "fail"] = "fail" if free < DISK_FAIL else "warn" if free < DISK_WARN else "ok"
    advice = "free some space, or set COMPUTESHARE_HOME to a larger disk: checkpoints and data sets lie there"
    return Check("disk", status, f"{size(free)} free", "" if status == "ok" else advice)


def processes(machine: Machine) -> Check:
    if machine.run is None:
        return Check("processes", "ok", "`computeshare up` does not run on this home")
    pids = [(role, pid) for role, each in machine.run.pids.items() for pid in each]
    dead = [f"{role} {pid}" for role, pid in pids if not psutil.pid_exists(pid)]
    if not dead:
        return Check("processes", "ok", ", ".join(f"{len(each)} {role}" for role, each in machine.run.pids.items()))
    if len(dead) == len(pids):
        advice = "`computeshare up` was killed; start it again"
        return Check("processes", "fail", f"{machine.settings.run_path} names only dead processes", advice)
    advice = f"`computeshare up` restarts them; if it does not, look at {machine.settings.home / 'logs'}"
    return Check("processes", "warn", f"not there: {', '.join(dead)}", advice)


def port(machine: Machine) -> Check:
    if machine.run and urlsplit(machine.run.url).port == machine.port and processes(machine).status != "fail":
        return Check("port", "ok", f"{machine.port} is that of the running `computeshare up`")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", machine.port))
        except OSError as error:
            advice = f"start with another: computeshare up --port {machine.port + 1}"
            return Check("port", "warn", f"{machine.port} cannot be had: {error.strerror}", advice)
    return Check("port", "ok", f"{machine.port} is free")


def broker(machine: Machine) -> Check:
    try:
        url = machine.settings.resolve_redis_url()
    except SettingsError:
        return Check("broker", "warn", "none is known here", "start `computeshare up`, or set COMPUTESHARE_REDIS_URL")
    try:
        with connect(url, retries=0) as redis:
            info: dict[str, Any] = dict(redis.info())
            times_s = [_timed(redis.ping) for _ in range(5)]
    except (RedisError, OSError, ValueError, SettingsError) as error:
        advice = "start `computeshare up`, or look at COMPUTESHARE_REDIS_URL, the network and the password"
        return Check("broker", "fail", f"{_without_password(url)}: {error}", advice)
    name = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {info.get('redis_version')}"
    found = f"{name} at {_without_password(url)}, answers in {1000 * statistics.median(times_s):.1f} ms"
    version = tuple(int(part) for part in str(info.get("redis_version", "0")).split(".")[:2])
    if version < _OLDEST_BROKER:
        return Check("broker", "fail", found, "use Valkey, or Redis 6.2 or newer")
    if info.get("maxmemory") and info.get("maxmemory_policy") != "noeviction":
        advice = "set maxmemory-policy noeviction: with any other, rounds vanish when memory is short"
        return Check("broker", "warn", found, advice)
    return Check("broker", "ok", found)


def control_plane(machine: Machine) -> Check:
    try:
        document, _, _ = machine.readiness
    except SettingsError:
        return Check("control plane", "warn", "none is known here", "start `computeshare up`, or set COMPUTESHARE_URL")
    except ComputeShareError as error:
        return Check("control plane", "fail", str(error), "start `computeshare up`, or look at COMPUTESHARE_URL")
    dependencies: dict[str, dict[str, Any]] = document.get("dependencies") or {}
    lacking = [f"{name}: {found.get('detail')}" for name, found in dependencies.items() if not found.get("ok")]
    if lacking or document.get("status") != "ready":
        return Check("control plane", "fail", "; ".join(lacking) or "not ready", "look at its logs")
    return Check("control plane", "ok", f"{machine.client.url} is ready")


def token(machine: Machine) -> Check:
    try:
        next(machine.client.jobs(limit=1), None)
    except ApiError as error:
        advice = "set COMPUTESHARE_TOKEN to the control plane's token (the file HOME/token on its machine)"
        return Check("token", "fail", str(error), advice)
    except ComputeShareError:
        return Check("token", "warn", "cannot be tried: no control plane answers")
    return Check("token", "ok", "is accepted")


def clock(machine: Machine) -> Check:
    try:
        _, headers, now = machine.readiness
        skew_s = now - parsedate_to_datetime(headers["Date"]).timestamp() - 0.5  # the header has whole seconds
    except (ComputeShareError, KeyError, ValueError):
        return Check("clock", "warn", "cannot be compared: no control plane answers")
    if abs(skew_s) <= SKEW_S:
        return Check("clock", "ok", "agrees with the control plane's")
    found = f"{duration(abs(skew_s))} {'ahead of' if skew_s > 0 else 'behind'} the control plane's"
    return Check("clock", "warn", found, "rounds do not mind, but times shown here are off: set the clock")


def data_sets(machine: Machine) -> Check:
    found: dict[str, str] = machine.probe.get("data_sets", {})
    if not found:
        return Check("data sets", "warn", "not looked at: torch does not load")
    damaged = [f"{name}: {trouble}" for name, trouble in found.items() if trouble not in ("", "missing")]
    there = ", ".join(name for name, trouble in found.items() if not trouble)
    if damaged:
        return Check("data sets", "fail", "; ".join(damaged), "delete what is damaged: it is downloaded again")
    missing = ", ".join(name for name, trouble in found.items() if trouble)
    return Check("data sets", "ok", f"{there} here" + (f"; downloaded when first used: {missing}" if missing else ""))


CHECKS: tuple[Callable[[Machine], Check], ...] = (
    python,
    packages,
    device,
    home,
    disk,
    processes,
    port,
    broker,
    control_plane,
    token,
    clock,
    data_sets,
)


def diagnose(machine: Machine) -> list[Check]:
    """Every check, in order."""
    return [check(machine) for check in CHECKS]


def table(checks: list[Check]) -> Table:
    """The checks for people."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for check in checks:
        icon, style = _LOOKS[check.status]
        advice = Text(f"\n→ {plain(check.advice)}", style) if check.advice else Text()
        grid.add_row(Text(icon, style), check.name, Text(plain(check.finding)) + advice)
    return grid


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
