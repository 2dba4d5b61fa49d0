"""Waiting for a condition that another process makes true."""

import time
from collections.abc import Callable


def wait_until(true: Callable[[], object], what: str, limit_s: float, every_s: float = 0.1) -> float:
    """Call `true` every `every_s` until its result is true; returns the seconds waited.

    Args:
        what: what is waited for, for the error's message.
    Raises: TimeoutError: it is still not true after `limit_s`.
    """
    began = time.monotonic()
    while not true():
        if time.monotonic() - began > limit_s:
            raise TimeoutError(f"waited {limit_s:.0f} s for {what}")
        time.sleep(every_s)
    return time.monotonic() - began
