"""The two servers that the embedded broker is tested with."""

import shutil

import pytest

from computeshare.up import embedded_broker
from tests.support.requirements import lacking

SERVERS = ("valkey", "redis")


def use_server(name: str, patch: pytest.MonkeyPatch) -> None:
    """Have brokers that are started from now on be Valkey's server, or Redis's."""
    if name == "redis":
        server = shutil.which("redis-server") or lacking("no redis-server")
        patch.setattr(embedded_broker, "find_server", lambda: server)
