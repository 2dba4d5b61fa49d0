"""A reducer in a thread, and what it has reached."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from computeshare.protocol.round_store import RoundStore
from computeshare.reducer.process import Reducer


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, "this never came true"
        time.sleep(0.02)


@contextmanager
def running(reducer: Reducer) -> Iterator[Reducer]:
    """It runs until the end of the block."""
    thread = threading.Thread(target=reducer.run, daemon=True)
    thread.start()
    try:
        yield reducer
    finally:
        reducer.stop.set()
        thread.join(30)
    assert not thread.is_alive()


def version_of(store: RoundStore) -> int:
    state = store.read()
    return state.version if state else -1
