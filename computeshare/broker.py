"""Connections to the broker (Redis or Valkey)."""

from redis import Redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry

from computeshare.errors import SettingsError

BLOCK_MS = 4000
"""Longest single blocking wait, in milliseconds; below the socket's timeout."""


def connect(url: str, retries: int = 60) -> Redis:
    """A client that rides out an outage of the broker: `retries` attempts with jitter, 5 s apart at most.

    Args:
        url: `redis://`, `rediss://` or `unix://`, with the password inside.
        retries: 0 for callers that would rather report the outage at once.
    Raises: SettingsError: `url` is none.
    """
    retry = Retry(ExponentialWithJitterBackoff(base=0.2, cap=5), retries)
    try:
        return Redis.from_url(
            url, socket_timeout=BLOCK_MS / 1000 + 6, socket_connect_timeout=5, retry=retry, health_check_interval=0
        )
    except ValueError as error:
        raise SettingsError(f"this is no address of a broker: {error}") from error
