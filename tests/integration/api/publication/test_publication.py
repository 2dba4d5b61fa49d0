"""The jobs in the broker, as the dispatcher sees them every turn."""

import secrets
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from redis import Redis

from api.publication import publication
from api.publication.publication import Publisher


def test_a_jobs_size_is_computed_once_and_forgotten_with_the_job(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [SimpleNamespace(id=secrets.token_hex(4), spec={"codec": "auto"}) for _ in range(3)]
    computed: list[Any] = []

    def spec_of(document: Any) -> SimpleNamespace:
        computed.append(document)
        return SimpleNamespace(broker_bytes=1000)

    monkeypatch.setattr(publication, "spec_of", spec_of)
    publisher = Publisher(Mock())
    publisher.look(redis, jobs)
    publisher.look(redis, jobs)
    assert len(computed) == 3
    publisher.look(redis, jobs[:1])
    assert [job_id for job_id, _ in publisher._needed] == [jobs[0].id]
