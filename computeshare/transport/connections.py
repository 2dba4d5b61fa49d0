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
from computeshare.transport.addresses import FORWARDED, without_secret
from computeshare.transport.refusals import RefusedForNow, refused_for_now

BLOCK_MS = 4000
"""Longest single blocking command, in milliseconds; below the socket's timeout."""
LONGEST_PAUSE_S = 5.0
RETRIES, FIRST_RETRY_S, LAST_RETRY_S = 150, 0.2, 2.0
"""Retries of a call during an outage of the broker, and upper limits of the first and of later pauses between them."""
_BUSY = re.compile(r"(^|caused error: )BUSY ")
"""The broker's refusal of commands while a script is running; a pipeline puts its own words in front."""
_CUT_SHORT = re.compile(r"rediss?://[^/?#]*[/?#].*@", re.DOTALL)
"""An address with an unescaped `/`, `?` or `#` in its password: the text before it would be taken for the host."""

Answer = TypeVar("Answer")
log = structlog.get_logger()


def when_there_is_room(call: Callable[[], Answer], stop: threading.Event) -> Answer:
    """Repeat a call while the broker has no memory for it, or a gateway refuses it for now; with growing pauses and
    jitter.

    A refused call must have changed nothing. Raises OutOfMemoryError: `stop` was set meanwhile.
    """
    pause_s = 0.2
    while True:
        try:
            return call()
        except OutOfMemoryError as error:
            least_s, said = 0.0, "the broker is out of memory"
            if isinstance(error, RefusedForNow):
                least_s, said = error.wait_s, f"the gateway refused: {error}"
            log.warning(said, again_within_s=least_s + pause_s)
            if stop.wait(least_s + random.uniform(0.5, 1) * pause_s):
                raise
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)


def is_next_door(redis: Redis) -> bool:
    """Whether the broker is reached through a unix socket and so is on this machine: sending then costs next to
    nothing.

    An address like 127.0.0.1 does not prove that, since it may be the near end of a tunnel; nor does a forwarder's
    socket.
    """
    return "path" in redis.connection_pool.connection_kwargs and not is_forwarded(redis)


def is_forwarded(redis: Redis) -> bool:
    """Whether the broker is reached through a gateway, as by machines that joined by an invite."""
    return str(redis.connection_pool.connection_kwargs.get("path")).endswith(f"/{FORWARDED}")


def by_loopback(redis: Redis) -> Redis:
    """A TCP client of the same broker, if `redis` uses a unix socket and the broker also listens on 127.0.0.1; else
    `redis`.

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
        return redis  # the broker hides its port from this user
    except (RedisConnectionError, RedisTimeoutError):
        redis.ping()  # raises if the broker is not reachable at all
        return redis
    return Redis(connection_pool=ConnectionPool(**there)) if found.get("run_id") == about.get("run_id") else redis


class OutageRetry(Retry):
    """Repeats calls during an outage of the broker, or while the broker is busy with a script.

    A busy broker refuses a command before executing it, so a repetition is safe. A gateway's refusal for now is raised
    as RefusedForNow.
    """

    def call_with_retry(self, do: Callable[[], Answer], *arguments: Any, **named: Any) -> Answer:
        def do_unless_busy() -> Answer:
            try:
                return do()
            except ResponseError as error:
                if _BUSY.search(str(error)):
                    raise BusyLoadingError(str(error)) from error
                if refusal := refused_for_now(error):
                    raise refusal from error
                raise

        return super().call_with_retry(do_unless_busy, *arguments, **named)


def connect(url: str, retries: int = RETRIES, timeout_s: float = BLOCK_MS / 1000 + 6) -> Redis:
    """A client that waits out outages of the broker: up to `retries` retries with jitter, at most 2 s apart.

    Args:
        url: `redis://`, `rediss://` or `unix://`, including the password.
        retries: 0 for callers that report an outage at once.
        timeout_s: most seconds to wait for a reply.
    Raises: SettingsError: `url` is malformed.
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
    except ValueError as error:  # its message may quote a part of the password
        raise SettingsError(
            f"{without_secret(url)} is no address of a broker: give redis://USER:PASSWORD@HOST:6379/0, rediss:// or "
            "unix://; what the password has of / ? # @ is written %2F %3F %23 %40"
        ) from error
