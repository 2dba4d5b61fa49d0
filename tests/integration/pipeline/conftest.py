"""What tests of the reducer share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from computeshare.protocol.round_store import RoundStore
from tests.support.job_reducer import Job, spec_of


@pytest.fixture
def start(redis: Redis, tmp_path: Path) -> Callable[..., Job]:
    """Makes jobs with a reducer; the fields are those of `spec_of`."""
    count = iter(range(100))

    def start(**changes: Any) -> Job:
        number = next(count)
        job_id = f"{tmp_path.name[-4:].replace('_', '0')}{number:04d}"
        RoundStore(redis, job_id).purge()
        return Job(redis, job_id, spec_of(**changes), tmp_path / str(number))

    return start
