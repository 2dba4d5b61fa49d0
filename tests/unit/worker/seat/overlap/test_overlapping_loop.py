"""A seat in a job with a delay: what it keeps when a lease comes to nothing."""

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np

from computeshare.codecs.feedback import Feedback
from computeshare.codecs.registry import CODECS
from computeshare.errors import Interrupted
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol.worker_session import Grant
from computeshare.types import Token
from computeshare.worker.seat.overlap.overlapping_loop import OverlappingLoop
from computeshare.worker.seat.seat_loop import SeatStatus

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
        "devices": SimpleNamespace(load=None),
        "versions": SimpleNamespace(give=give, bytes=0),
        "uploads": SimpleNamespace(begin=lambda units: units, give_up=given_up.append),
        "memory": SimpleNamespace(check_taken=lambda: None),
    }
    loop = OverlappingLoop(SPEC, feedback=feedback, status=SeatStatus(), stop=threading.Event(), **parts)
    loop._work(Grant("leased", str(Token(0, 1, "0" * 16)), 0, (3,)))
    assert given_up == released == [(3,)]
    assert np.array_equal(feedback.residual(0), owed)
