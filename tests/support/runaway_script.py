"""A script that runs away and keeps a real broker busy, until somebody kills it."""

import contextlib
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry

from tests.support.wait import wait_until

REFUSES_AFTER_MS = 100
"""After so long the broker answers everybody else with BUSY; by default after five seconds."""


def _client(url: str) -> Redis:
    return Redis.from_url(url, socket_timeout=None, retry=Retry(NoBackoff(), 0))


@contextmanager
def busy_broker(url: str) -> Iterator[None]:
    """From the moment when the broker refuses everybody until the end of the block."""
    with closing(_client(url)) as loop, closing(_client(url)) as other:
        other.config_set("busy-reply-threshold", REFUSES_AFTER_MS)

        def run_away() -> None:
            with contextlib.suppress(RedisError):  # that it was killed
                loop.eval("while true do end", 0)

        thread = threading.Thread(target=run_away)
        thread.start()
        try:
            wait_until(lambda: _is_busy(other))
            yield
        finally:
            other.script_kill()
            thread.join()


def _is_busy(client: Redis) -> bool:
    try:
        client.ping()
    except ResponseError as error:
        return str(error).startswith("BUSY ")
    return False
