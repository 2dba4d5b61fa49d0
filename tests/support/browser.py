"""The control plane that a browser looks at, the windows it looks through, and pages that remember what went wrong."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import BrowserContext, Page, Route, ViewportSize
from redis import Redis

from api.deps import Services
from computeshare.settings import Settings, login_path

SCREENSHOTS = Path(__file__).resolve().parents[2] / "artifacts" / "screenshots"
Scheme = Literal["light", "dark"]


@dataclass(frozen=True)
class Window:
    """What a reader looks through."""

    width: int
    """In CSS pixels."""
    scheme: Scheme

    def __str__(self) -> str:
        return f"{self.width}-{self.scheme}"

    @property
    def options(self) -> dict[str, Any]:
        """Of a browser's context."""
        return {"viewport": self._size, "color_scheme": self.scheme}

    def apply(self, page: Page) -> None:
        """Look at an open page through this window."""
        page.set_viewport_size(self._size)
        page.emulate_media(color_scheme=self.scheme)

    @property
    def _size(self) -> ViewportSize:
        return {"width": self.width, "height": 900}


Test = TypeVar("Test", bound=Callable[..., object])
WINDOWS = [Window(width, scheme) for width in (390, 1280) for scheme in get_args(Scheme)]


def in_every_window(test: Test) -> Test:
    """For a test of something that readers do: its pages are opened in each of the windows, and pictures are kept."""
    return pytest.mark.sampled(1)(pytest.mark.usefixtures("window")(test))  # type: ignore[no-any-return]


def picture(page: Page, name: str, whole: bool = False) -> None:
    """Keep a picture of a page, or of the whole of it, which must not scroll sideways."""
    page.wait_for_load_state()  # a click may have led there
    wide, seen = page.evaluate("() => [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide <= seen, f"{name} scrolls sideways"
    page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=whole)


def forgive(page: Page, path: str) -> None:
    """Have the answers at a path shown as they are, but as if all were well: of others a browser complains."""

    def answer(route: Route) -> None:
        own = {"sec-fetch-site": "same-origin"}  # which the browser would have added on the way
        route.fulfill(response=route.fetch(headers=route.request.headers | own), status=200)

    page.route(f"**{path}", answer)


def problems(page: Page) -> list[str]:
    """What axe-core finds wrong with a page: its rule and the first element."""
    return [f"{one['id']}: {one['nodes'][0]['html'][:150]}" for one in Axe().run(page).response["violations"]]


def picture_of_test(page: Page, request: pytest.FixtureRequest) -> None:
    """Keep a picture of how a test of a reader's action left a page."""
    picture(page, f"actions/{re.sub(r'[^a-z0-9]+', '-', request.node.name).strip('-')}")


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
