"""A seat in a job with a delay: what it keeps when a lease comes to nothing."""

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from computeshare.codecs.feedback import Feedback
from computeshare.codecs.registry import CODECS
from computeshare.errors import CodecError, Interrupted
from computeshare.gossip.exchange import ExchangeReport
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol.worker_session import Grant
from computeshare.types import Token
from computeshare.worker.seat.overlap.overlapping_loop import OverlappingLoop
from computeshare.worker.seat.seat_loop import SeatStatus

GOSSIP = JobSpec.model_validate({"dataset": "digits", "model": "mlp", "strategy": {"kind": "gossip"}})
SPEC = JobSpec.model_validate({"dataset": "digits", "model": "mlp", "strategy": {"kind": "sync", "delay": 1}})


def test_a_lease_that_is_called_off_before_it_is_computed_keeps_the_residual_of_the_one_before() -> None:
    feedback = Feedback([CODECS["topk"]], [4096])
    feedback.mark()
    feedback.encode(0, np.arange(4096, dtype=np.float32))  # the lease before, which is being sent
    owed = feedback.residual(0).copy()
    assert owed.any()
    given_up: list[Any] = []
    released: list[Any] = []

    def give(*_: object) -> bool:
        raise Interrupted("called off")

    parts: dict[str, Any] = {
        "session": SimpleNamespace(release=released.append),
        "devices": SimpleNamespace(load=None, working=[0]),
        "versions": SimpleNamespace(give=give, bytes=0),
        "uploads": SimpleNamespace(begin=lambda units, token: units, give_up=given_up.append),
        "memory": SimpleNamespace(check_taken=lambda: None),
    }
    loop = OverlappingLoop(SPEC, feedback=feedback, status=SeatStatus(), stop=threading.Event(), **parts)
    loop._work(Grant("leased", str(Token(0, 1, "0" * 16)), 0, (3,)))
    assert given_up == released == [(3,)]
    assert np.array_equal(feedback.residual(0), owed)


class Recorder:
    """A peer, its uploads and its session: what the loop has them do, in order."""

    def __init__(self, lost_after: int) -> None:
        self.done: list[str] = []
        self.left, self.bytes, self.working, self.newest = 3, 0, [0], "1.2.bbbbbbbbbbbbbbbb"
        self.lost_after = lost_after
        self.outbox = SimpleNamespace(encoding_s=0.0, bytes=0)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None: ...

    def lease(self, token: str) -> Grant:
        self.left -= 1
        return Grant("leased" if self.left else "completed", token, 0, (self.left,))

    def take_back(self) -> str | None:
        return "weights before 2" if self.left == self.lost_after else None

    def go_back(self, mark: str) -> None:
        self.done.append(f"back to {mark}")

    def mark(self) -> str:
        return f"weights before {self.left}"

    def give(self, session: object, token: str, load: Any) -> bool:
        self.done.append(f"loads {token}")
        return True

    def load(self, weights: object) -> None: ...
    def check_taken(self) -> None: ...
    def peak_bytes(self) -> int:
        return 0

    def begin(self, units: tuple[int, ...], token: str) -> "Recorder":
        self.token = token
        return self

    def compute(self, units: tuple[int, ...], work: object) -> None:
        self.done.append(f"computes {units[0]}")

    def send(self, upload: object, report: object, before: str) -> None:
        self.done.append(f"sends on {self.token[:3]}, {before}")

    def report(self) -> ExchangeReport:
        return ExchangeReport()


def test_a_peer_goes_back_before_its_next_unit_and_leases_on_the_newest_version() -> None:
    recorder: Any = Recorder(lost_after=2)
    parts = dict.fromkeys(("session", "devices", "versions", "uploads", "memory", "peer"), recorder)
    loop = OverlappingLoop(GOSSIP, feedback=None, status=SeatStatus(), stop=threading.Event(), **parts)
    assert loop.run() == "the job is completed"
    assert recorder.done == [
        "loads 1.2.bbbbbbbbbbbbbbbb",
        "computes 2",
        "sends on 1.2, weights before 2",
        "back to weights before 2",
        "computes 1",
        "sends on 1.2, weights before 1",
    ]


def test_damaged_weights_are_doubted_in_mid_unit_too() -> None:
    token, doubted = str(Token(0, 2, "0" * 16)), list[tuple[str, bool]]()
    session = SimpleNamespace(
        keys=SimpleNamespace(job_id="job"),
        doubt=lambda token, again: doubted.append((token, again)),
        wait=lambda timeout_ms: None,
    )

    def give(session: object, token: str, load: object) -> bool:
        raise CodecError("the checksum does not match")

    parts: dict[str, Any] = dict.fromkeys(("devices", "uploads", "memory"))
    versions: Any = SimpleNamespace(wait_for=lambda *about: token, give=give, forget=lambda: None)
    loop = OverlappingLoop(
        SPEC,
        session,
        feedback=None,
        versions=versions,
        status=SeatStatus(),
        stop=threading.Event(),
        **parts,  # type: ignore[arg-type]
    )
    loop._loaded = str(Token(0, 1, "0" * 16))
    for again in (False, True):
        loop._is_off = False  # as with each new lease
        for _ in range(2):  # devices
            with pytest.raises(Interrupted):
                loop.switch(2, lambda weights: None, lambda: True)
        assert doubted == [(token, again)]
        doubted.clear()


def test_an_error_of_the_broker_in_mid_unit_is_the_seats_and_not_a_devices() -> None:
    given_up: list[Any] = []

    def wait_for(*about: object) -> str:
        raise ConnectionError("the broker is away")

    def compute(units: object, work: object) -> None:
        for _ in range(2):  # devices
            with pytest.raises(Interrupted):
                loop.switch(2, lambda weights: None, lambda: True)
        raise Interrupted

    parts: dict[str, Any] = {
        "session": SimpleNamespace(release=given_up.append),
        "devices": SimpleNamespace(load=None, working=[0, 1], compute=compute),
        "versions": SimpleNamespace(wait_for=wait_for, give=lambda *about: True),
        "uploads": SimpleNamespace(begin=lambda units, token: units, give_up=given_up.append),
        "memory": SimpleNamespace(check_taken=lambda: None),
    }
    loop = OverlappingLoop(SPEC, feedback=None, status=SeatStatus(), stop=threading.Event(), **parts)
    with pytest.raises(ConnectionError, match="the broker is away"):
        loop._work(Grant("leased", str(Token(0, 1, "0" * 16)), 0, (3,)))
    assert given_up == [(3,), (3,)] and loop._switching_s == 0
