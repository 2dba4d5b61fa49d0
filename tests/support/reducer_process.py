"""A reducer in a thread, and what it has reached."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from computeshare.protocol.round_store import RoundStore
from computeshare.reducer.process import Reducer, warm


@contextmanager
def running(reducer: Reducer) -> Iterator[Reducer]:
    """Run a reducer until the end of the block, warmed as in its own process: slow imports would cost it its claims."""
    warm()
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
