"""The broker through which the processes of a group, plain scripts, exchange tensors."""

from redis import Redis

from computeshare.errors import SettingsError
from computeshare.settings import Settings
from computeshare.transport.connections import connect

RETRIES, TIMEOUT_S = 2, 10.0
"""A loop does not wait for a broker that is away: calls are soon given up."""


def connect_group(group: str, broker: str) -> Redis:
    """Connect to `broker` or, if it is empty, to that of the control plane on this machine.

    Raises SettingsError: `group` cannot be a group's name, or no broker is known.
    """
    if not group.replace("-", "").replace("_", "").isalnum() or len(group) > 64:
        raise SettingsError(f"group {group!r}: letters, digits, - and _ are allowed, 64 at most")
    return connect(broker or Settings().resolve_redis_url("worker"), RETRIES, TIMEOUT_S)
