"""The input of the checks, and their result."""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

from redis import Redis
from redis.exceptions import ResponseError

from computeshare.client import Client
from computeshare.errors import SettingsError
from computeshare.protocol.handshake import Release, published
from computeshare.settings import RunFile, Settings
from computeshare.transport.connections import connect
from computeshare.worker.invite import last_joined

PROBE_S = 180.0
_PINGS = 5


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check: the finding, and advice if it is not `ok`."""

    name: str
    status: Literal["ok", "warn", "fail"]
    finding: str
    advice: str = ""

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True)
class Surroundings:
    """The input of the checks; slow facts are computed once, on first use."""

    settings: Settings
    port: int

    @cached_property
    def run(self) -> RunFile | None:
        return RunFile.read(self.settings.run_path)

    @cached_property
    def probe(self) -> dict[str, Any]:
        """The findings of a process with torch (see `doctor/probe.py`), or `{"error": ...}`."""
        command = [sys.executable, "-m", "computeshare.doctor.probe", str(self.settings.data_dir)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S, check=False)
        except subprocess.TimeoutExpired:
            return {"error": f"importing torch took longer than {PROBE_S:.0f} s"}
        except OSError as error:
            return {"error": f"{sys.executable} cannot be run: {error.strerror}"}
        try:
            return dict(json.loads(done.stdout.splitlines()[-1]))
        except (ValueError, IndexError):
            return {"error": (done.stderr.splitlines() or ["it ended without any output"])[-1]}

    @cached_property
    def broker(self) -> "BrokerReport":
        """The broker's report. Raises SettingsError if no broker is known, and the connection's errors."""
        joined = last_joined(self.settings)
        with joined.broker_url() as url, connect(url, retries=0) as redis:
            info: dict[str, Any] = {**redis.info("server"), **_memory(redis)}
            times_s = [_timed(redis.ping) for _ in range(_PINGS)]
            return BrokerReport(joined.shown, info, statistics.median(times_s), _release(redis))

    @cached_property
    def client(self) -> Client:
        """A client of the control plane, without a token if none is known. Raises SettingsError without an address."""
        url = self.settings.resolve_url()
        try:
            return Client(url, self.settings.resolve_token())
        except SettingsError:
            return Client(url)

    @cached_property
    def readiness(self) -> tuple[dict[str, Any], Mapping[str, str], float]:
        """The document and headers of `/readyz`, and this machine's Unix time then. Raises ComputeShareError."""
        before = time.time()
        document, headers = self.client.ready()
        return document, headers, (before + time.time()) / 2


@dataclass(frozen=True, slots=True)
class BrokerReport:
    """A broker that answers: address without password, INFO, median ping in seconds, the control plane's release."""

    url: str
    info: Mapping[str, Any]
    answers_in_s: float
    release: Release | None


def _memory(redis: Redis) -> dict[str, Any]:
    try:
        return dict(redis.info("memory"))
    except ResponseError:  # a gateway does not tell
        return {}


def _release(redis: Redis) -> Release | None:
    try:
        return published(redis)
    except ResponseError:  # this user may not read it
        return None


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
