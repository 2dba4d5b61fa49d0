"""A worker's sign of life: it goes on whatever fails, and its goodbye is its last word."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as Away
from structlog.testing import capture_logs

from computeshare.protocol import handshake
from computeshare.queue import Orders, WorkerInfo
from computeshare.worker import heartbeat as heartbeat_module
from computeshare.worker.heartbeat import REMIND_S, Heartbeat, Outage

PATIENCE_S = 20
WORKER = WorkerInfo("aaaaaaaaaaaa", "mac", "cpu", ("q",), {}, 1, "host", 1)
USUAL, HASTY = Redis(), Redis()


class Broker:
    """Stands where the heartbeat would ask a broker; `said` is what it was told, over which connection."""

    def __init__(self) -> None:
        self.said: list[tuple[str, Redis]] = []
        self.fails: list[Exception] = []
        self.registering: Callable[[], object] = lambda: None
        self.heard = threading.Event()

    def check(self, redis: Redis, _: str) -> None:
        if self.fails:
            raise self.fails.pop(0)

    def register(self, redis: Redis, _: WorkerInfo) -> None:
        self.registering()
        self.said.append(("here", redis))
        self.heard.set()

    def unregister(self, redis: Redis, _: str) -> None:
        self.said.append(("goodbye", redis))


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Broker:
    found = Broker()
    monkeypatch.setattr(handshake, "check", found.check)
    monkeypatch.setattr(heartbeat_module, "register", found.register)
    monkeypatch.setattr(heartbeat_module, "unregister", found.unregister)
    monkeypatch.setattr(heartbeat_module, "read_orders", lambda *_: Orders())
    monkeypatch.setattr(heartbeat_module, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(heartbeat_module, "LAST_BEAT_S", PATIENCE_S)
    return found


@pytest.fixture
def heartbeat(broker: Broker) -> Iterator[Heartbeat]:
    found = Heartbeat(USUAL, HASTY, WORKER)
    yield found
    found.stop()


class FullDisk:
    """A log that nothing can be written to."""

    def __getattr__(self, _: str) -> Callable[..., None]:
        def write(*_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device")

        return write


def test_it_goes_on_whatever_fails_be_it_the_log(
    broker: Broker, heartbeat: Heartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.fails = [Away("refused"), TypeError("psutil"), RuntimeError("dictionary changed size during iteration")]
    monkeypatch.setattr(heartbeat_module, "log", FullDisk())
    heartbeat.start()
    assert broker.heard.wait(PATIENCE_S) and broker.fails == [] and heartbeat.is_alive()


def test_the_goodbye_comes_after_the_beat_at_hand(broker: Broker) -> None:
    begun, go_on = threading.Event(), threading.Event()
    broker.registering = lambda: (begun.set(), go_on.wait(PATIENCE_S))
    heartbeat = Heartbeat(USUAL, HASTY, WORKER)
    heartbeat.start()
    assert begun.wait(PATIENCE_S)
    leaving = threading.Thread(target=heartbeat.stop)
    leaving.start()
    assert heartbeat._stop_request.wait(PATIENCE_S)
    go_on.set()
    leaving.join(PATIENCE_S)
    assert [word for word, _ in broker.said] == ["here", "goodbye"]


def test_a_beat_that_was_slow_to_begin_registers_no_worker_that_has_left(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(handshake, "check", lambda *_: (begun.set(), go_on.wait(PATIENCE_S)))
    monkeypatch.setattr(heartbeat_module, "LAST_BEAT_S", 0)
    heartbeat = Heartbeat(USUAL, HASTY, WORKER)
    heartbeat.start()
    assert begun.wait(PATIENCE_S)
    heartbeat.stop()
    go_on.set()
    heartbeat.join(PATIENCE_S)
    assert [word for word, _ in broker.said] == ["goodbye"]


def test_before_sleep_the_broker_is_told_over_the_connection_that_does_not_wait(broker: Broker) -> None:
    heartbeat = Heartbeat(USUAL, HASTY, WORKER)
    heartbeat.sleeper.before()
    heartbeat.sleeper.after()
    assert [redis is HASTY for _, redis in broker.said] == [True, True]
    heartbeat.beat(USUAL)
    assert broker.said[-1] == ("here", USUAL)


def test_an_outage_is_told_at_once_then_seldom_and_when_it_is_over() -> None:
    now = [0.0]
    outage = Outage(lambda: now[0])
    with capture_logs() as lines:
        outage.is_over()
        for _ in range(30):
            outage.lasts(Away("refused"))
            now[0] += 2
        assert [line["event"] for line in lines] == ["broker away"]
        now[0] = REMIND_S
        outage.lasts(Away("refused"))
        outage.is_over()
        outage.is_over()
        outage.lasts(Away("refused"))
    assert [line["event"] for line in lines] == [
        "broker away", "broker away", "the broker hears this worker again", "broker away",
    ]  # fmt: skip
