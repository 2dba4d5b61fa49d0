"""The control plane that a browser looks at."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from redis import Redis

from api.deps import Services
from computeshare.settings import Settings, login_path


@dataclass
class Site:
    """A control plane that runs in this process, on a port of its own."""

    url: str
    settings: Settings
    services: Services
    redis: Redis

    @property
    def login(self) -> str:
        """The address that lets a browser in."""
        return self.url + login_path(self.services.token)


def wait_until(true: Callable[[], bool], timeout_s: float = 20) -> None:
    """Return once `true()` is; fail if that takes too long."""
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "this never came true"
        time.sleep(0.02)
