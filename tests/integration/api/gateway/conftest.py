"""What the gateway's tests share."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from computeshare.settings import Settings
from tests.support.gateway import Plane
from tests.support.served_api import serving


@pytest.fixture
def plane(migrated: Path, tmp_path: Path, redis_url: str) -> Iterator[Plane]:
    home = shutil.copytree(migrated.parent, tmp_path / "plane")
    settings = Settings(home=home, redis_url=redis_url, public_url="https://home.example")
    with serving(settings) as (url, app):
        yield Plane(url, app, settings)
