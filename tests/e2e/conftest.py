"""A browser, and a control plane with its broker for it to look at."""

import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from api.main import create_app
from computeshare.settings import Settings
from computeshare.transport.connections import connect
from computeshare.up.embedded_broker import EmbeddedBroker
from tests.support.browser import WINDOWS, Site, Watched, Window, picture_of_test
from tests.support.control_plane import ControlPlane, control_plane
from tests.support.requirements import lacking
from tests.support.wait import wait_until

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM_ON_MAC = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
EXPECT_MS = 30_000
"""How long a test waits for a page: pages ask less often where the server is slow to answer."""
CHROMIUM_ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def find_chromium() -> str:
    """An installed Chromium; where there is none the test is skipped, and fails in CI."""
    on_path = (path for name in CHROMIUM_NAMES if (path := shutil.which(name)))
    found = next(on_path, CHROMIUM_ON_MAC if Path(CHROMIUM_ON_MAC).exists() else None)
    return found or lacking(f"no Chromium: install one of {', '.join(CHROMIUM_NAMES)}")


@pytest.fixture(scope="module")
def plane(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """`computeshare up` with the flags that the module names in UP."""
    with control_plane(tmp_path_factory.mktemp("home"), *getattr(request.module, "UP", ())) as plane:
        yield plane


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One browser for all tests; each opens contexts of its own."""
    path = find_chromium()
    expect.set_options(timeout=EXPECT_MS)
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=list(CHROMIUM_ARGUMENTS))
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The real application with a real broker, and nobody who trains."""
    home = tmp_path_factory.mktemp("home")
    broker = EmbeddedBroker.start(home / "broker.log")
    try:
        settings = Settings(home=home, redis_url=broker.url)
        app = create_app(settings)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
            server = uvicorn.Server(config)
            app.state.services.stopping = lambda: server.should_exit
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
            thread.start()
            wait_until(lambda: server.started)
            redis = connect(broker.url)
            yield Site(f"http://127.0.0.1:{listener.getsockname()[1]}", settings, app.state.services, redis)
            redis.close()
            server.should_exit = True
            thread.join()
    finally:
        broker.stop()


@pytest.fixture(params=WINDOWS, ids=str)
def window(request: pytest.FixtureRequest) -> Window:
    """Each of the windows in turn."""
    found: Window = request.param
    return found


@pytest.fixture
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """How this test's pages are opened: in its window, if it has one."""
    found: dict[str, Any] = request.getfixturevalue("window").options if "window" in request.fixturenames else {}
    return found


@pytest.fixture
def opened(browser: Browser, site: Site, options: dict[str, Any], request: pytest.FixtureRequest) -> Iterator[Any]:
    """Opens pages as a logged-in browser; at the end none of them may have complained about anything."""
    contexts: list[BrowserContext] = []
    watched: list[Watched] = []

    def open_page(path: str, **more: Any) -> Page:
        context = browser.new_context(**{**options, **more})
        contexts.append(context)
        one = Watched(context)
        watched.append(one)
        one.page.goto(site.login)
        one.page.goto(site.url + path)
        return one.page

    yield open_page
    for one in watched if options else ():
        picture_of_test(one.page, request)
    problems = [problem for one in watched for problem in one.problems]
    for context in contexts:
        context.close()
    assert problems == []
