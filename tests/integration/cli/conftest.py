"""A control plane with a trained job, for commands that use its model."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis import Redis

from computeshare.client import ComputeShare, Job
from computeshare.settings import Settings
from tests.support.served_api import serving
from tests.support.trained_job import trained_job


@pytest.fixture
def trained(
    settings: Settings, redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Job]]:
    """Makes jobs with a version to download, where the commands find them without a flag; as `trained_job`."""
    with serving(settings) as (url, _), ComputeShare(url, "secret", cache=tmp_path / "cache") as cs:
        for name, value in {"URL": url, "TOKEN": "secret", "HOME": str(settings.home)}.items():
            monkeypatch.setenv(f"COMPUTESHARE_{name}", value)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.chdir(tmp_path)
        yield functools.partial(trained_job, cs, redis, settings, queue="after")
