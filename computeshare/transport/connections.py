"""Connections to the broker (Redis or Valkey)."""

import random
import re
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import structlog
from redis import ConnectionPool, Redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import BusyLoadingError, OutOfMemoryError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from computeshare.errors import SettingsError
from computeshare.transport.addresses import without_secret

BLOCK_MS = 4000
"""Longest single blocking wait, in milliseconds; below the socket's timeout."""
LONGEST_PAUSE_S = 5.0
RETRIES, FIRST_RETRY_S, LAST_RETRY_S = 150, 0.2, 2.0
"""How often a call is repeated while the broker is away, and how long the pauses between are at most: at first, and
after a few of them.
"""
_BUSY = re.compile(r"(^|caused error: )BUSY ")
"""How the broker refuses everything while a script keeps it busy; a pipeline puts words of its own before."""
_CUT_SHORT = re.compile(r"rediss?://[^/?#]*[/?#].*@", re.DOTALL)
"""An address of which a part of the password would be taken for the host."""

Answer = TypeVar("Answer")
log = structlog.get_logger()


def when_there_is_room(call: Callable[[], Answer], stop: threading.Event) -> Answer:
    """Repeat a call that the broker refuses for want of memory, with growing pauses and jitter.

    The call must change nothing when it is refused. Raises OutOfMemoryError: `stop` was set meanwhile.
    """
    pause_s = 0.2
    while True:
        try:
            return call()
        except OutOfMemoryError:
            log.warning("the broker is out of memory", again_within_s=pause_s)
            if stop.wait(random.uniform(0.5, 1) * pause_s):
                raise
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)


def is_next_door(redis: Redis) -> bool:
    """Whether the broker is on this machine for certain, reached without a network: then sending costs next to nothing.

    An address like 127.0.0.1 may be the near end of a tunnel; a unix socket is none that we know of.
    """
    return "path" in redis.connection_pool.connection_kwargs


def by_loopback(redis: Redis) -> Redis:
    """A client of the same broker by TCP, where `redis` goes through a unix socket and the broker listens on this
    machine's loopback, too; else `redis` itself.

    Raises RedisError: the broker does not answer `redis`.
    """
    if not is_next_door(redis):
        return redis
    options = {name: value for name, value in redis.connection_pool.connection_kwargs.items() if name != "path"}
    try:
        about: Any = redis.info("server")
        there = {**options, "host": "127.0.0.1", "port": int(about["tcp_port"])}
        with Redis(connection_pool=ConnectionPool(**{**there, "retry": None})) as probe:
            found: Any = probe.info("server")
    except (ResponseError, KeyError, ValueError):
        return redis  # it does not tell everyone
    except (RedisConnectionError, RedisTimeoutError):
        redis.ping()  # this one raises if the broker is away altogether
        return redis
    return Redis(connection_pool=ConnectionPool(**there)) if found.get("run_id") == about.get("run_id") else redis


class OutageRetry(Retry):
    """Repeats what an outage of the broker kept from being done; a broker busy with a script is away, too.

    It refuses a command before it does anything, and to the callers it makes no difference why nobody serves them.
    """

    def call_with_retry(self, do: Callable[[], Answer], *arguments: Any, **named: Any) -> Answer:
        def do_unless_busy() -> Answer:
            try:
                return do()
            except ResponseError as error:
                if _BUSY.search(str(error)):
                    raise BusyLoadingError(str(error)) from error
                raise

        return super().call_with_retry(do_unless_busy, *arguments, **named)


def connect(url: str, retries: int = RETRIES, timeout_s: float = BLOCK_MS / 1000 + 6) -> Redis:
    """A client that rides out an outage of the broker: `retries` attempts with jitter, 2 s apart at most.

    Args:
        url: `redis://`, `rediss://` or `unix://`, with the password inside.
        retries: 0 for callers that would rather report the outage at once.
        timeout_s: how long an answer may take.
    Raises: SettingsError: `url` is none.
    """
    named = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": min(5.0, timeout_s),
        "retry": OutageRetry(ExponentialWithJitterBackoff(base=FIRST_RETRY_S, cap=LAST_RETRY_S), retries),
        "health_check_interval": 0,
    }
    try:
        if _CUT_SHORT.match(url):
            raise ValueError
        return Redis.from_url(url, **named)
    except ValueError as error:  # which may quote a part of the password
        raise SettingsError(
            f"{without_secret(url)} is no address of a broker: give redis://:PASSWORD@HOST:6379/0, rediss:// or "
            "unix://; what the password has of / ? # @ is written %2F %3F %23 %40"
        ) from error
