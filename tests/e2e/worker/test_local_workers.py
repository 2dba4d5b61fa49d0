"""Workers that `computeshare up` runs itself: it starts them again, unless a user removed them."""

import os
import signal
import time

import pytest

from tests.support.control_plane import ControlPlane

pytestmark = pytest.mark.e2e
UP = ("--workers", "1", "--queue", "e2e")
STAYS_AWAY_S = 3.0
"""Longer than `up` pauses before it starts a process again that has lived this long."""


def worker_of(plane: ControlPlane, pid: int) -> str | None:
    """The id of the worker that is this process, once it is online."""
    return next((worker["id"] for worker in plane.get("/v1/workers")["items"] if worker["pid"] == pid), None)


def test_up_starts_a_worker_again_that_a_signal_ended_but_none_that_a_user_removed(plane: ControlPlane) -> None:
    (first,) = plane.pids("worker")
    plane.until("the worker", lambda: worker_of(plane, first))
    os.kill(first, signal.SIGTERM)
    plane.until("another process", lambda: plane.pids("worker") not in ([], [first]), 30)
    (second,) = plane.pids("worker")
    worker_id = plane.until("the worker again", lambda: worker_of(plane, second))
    assert plane.http.delete(f"/v1/workers/{worker_id}").status_code == 204
    plane.until("its end", lambda: plane.pids("worker") == [], 30)
    gone_until = time.monotonic() + STAYS_AWAY_S
    while time.monotonic() < gone_until:
        assert plane.pids("worker") == []
        time.sleep(0.1)
