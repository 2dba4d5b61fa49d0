"""The control plane that a browser looks at, and pages that remember what went wrong."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from playwright.sync_api import BrowserContext
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


class Watched:
    """A page that remembers whatever went wrong in it."""

    def __init__(self, context: BrowserContext) -> None:
        self.page = context.new_page()
        self.problems: list[str] = []
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("response", lambda r: self.problems.append(f"{r.status} {r.url}") if r.status >= 400 else None)

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)
