"""A control plane for commands to talk to."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.http_answers import FakeServer, serving


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeServer]:
    """One that commands find by their settings, in a home of the test's own."""
    for name in [name for name in os.environ if name.startswith("COMPUTESHARE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COMPUTESHARE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COMPUTESHARE_TOKEN", "secret")
    monkeypatch.chdir(tmp_path)
    with serving() as fake:
        monkeypatch.setenv("COMPUTESHARE_URL", fake.url)
        yield fake
