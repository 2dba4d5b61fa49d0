"""The worker's command as far as it goes without a broker, and how one leaves between two RQ workers."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from structlog.testing import capture_logs

from computeshare.terminal.command import run
from computeshare.worker import process, rq_worker
from computeshare.worker.process import _take_seats, command
from computeshare.worker.rq_worker import SeatWorker

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """Leaves the signals of the tests' own process as they were."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Broken:
    """An RQ worker that takes the signals for itself, and fails."""

    leaving = False

    def work(self, **_: Any) -> None:
        def gone(*_: object) -> None:
            raise RuntimeError("the handler of a worker that is gone")

        for number in SIGNALS:
            signal.signal(number, gone)
        raise ConnectionError

    def kill_horse(self) -> None:
        pass


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_while_it_waits_to_start_over_is_a_clean_end(number: signal.Signals) -> None:
    class Waiting(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            signal.raise_signal(number)
            raise AssertionError("it went on")

    heartbeat: Any = SimpleNamespace(rq_worker=None)
    make: Any = Broken
    with pytest.raises(SystemExit) as ended:
        _take_seats(heartbeat, make, Waiting(), lambda *_: sys.exit(0))
    assert ended.value.code == 0


def test_a_request_that_was_lost_in_a_finalizer_is_heeded_before_it_starts_over() -> None:
    leaving, heartbeat, make = threading.Event(), SimpleNamespace(rq_worker=None), Broken
    leaving.set()
    _take_seats(heartbeat, make, leaving, lambda *_: None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("url", "warned"), [("redis://:hunter2@h/0", True), ("redis://h/0", False)])
def test_a_password_among_the_flags_is_warned_of(url: str, warned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]})
    served: list[str] = []
    monkeypatch.setattr(process, "serve", lambda redis_url, *_: served.append(redis_url))
    monkeypatch.setattr(process, "configure_logging", lambda: None)
    app = typer.Typer()
    app.command()(command)
    with capture_logs() as lines:
        assert run(app, ["--redis-url", url]) == 0
    assert served == [url]
    assert ["set COMPUTESHARE_REDIS_URL instead" in line["event"] for line in lines] == [True] * warned
    assert "hunter2" not in str(lines)


def test_a_worker_that_is_to_be_upgraded_is_not_ended_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its signal handler ends the process soon otherwise, in the middle of the installation."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(rq_worker, "end_soon_after", lambda _, busy, **__: given.update(busy=busy))
    upgrading = [True]
    worker = SeatWorker.__new__(SeatWorker)  # a constructed one asks its broker
    worker.face, worker.exit_code, worker.stays = None, lambda: 0, lambda: upgrading[0]
    worker._end_soon()
    assert given["busy"]() is True
    upgrading[0] = False
    assert given["busy"]() is False


@pytest.mark.parametrize(
    ("prefix", "warned"), [("/home/a/.cache/uv/archive-v0/x", True), ("/home/a/.local/share/uv/tools/x", False)]
)
def test_a_service_of_an_environment_that_may_be_removed_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, prefix: str, warned: bool
) -> None:
    app = typer.Typer()
    app.command()(command)
    monkeypatch.setattr(sys, "prefix", prefix)
    address = ["--redis-url", "redis://broker.example:6379/0"]
    assert run(app, [*address, "--home", str(tmp_path), "--print-service", "systemd"]) == 0
    assert ("uv tool install" in capsys.readouterr().err) is warned
