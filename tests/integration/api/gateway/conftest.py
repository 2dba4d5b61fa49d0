"""What the gateway's tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from computeshare.settings import Settings
from tests.support.gateway import Plane
from tests.support.served_api import serving


@pytest.fixture
def plane(tmp_path: Path, redis_url: str) -> Iterator[Plane]:
    settings = Settings(home=tmp_path / "plane", redis_url=redis_url, public_url="https://home.example")
    with serving(settings) as (url, app):
        yield Plane(url, app, settings)
