"""Waiting for something to come true."""

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def wait_until(holds: Callable[[], Found], timeout_s: float = 60, pause_s: float = 0.02) -> Found:
    """What `holds` returns, as soon as it is true; fails after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (found := holds()):
        assert time.monotonic() < deadline, f"not true within {timeout_s:g} s"
        time.sleep(pause_s)
    return found
