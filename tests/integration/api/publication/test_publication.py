"""The jobs in the broker, as the dispatcher sees them every turn."""

import secrets
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from redis import Redis

from api.publication.publication import Publisher
from computeshare.jobspec.spec import JobSpec


def test_a_jobs_size_is_computed_once_and_forgotten_with_the_job(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = JobSpec(dataset="digits", model="mlp", codec="auto")
    jobs = [SimpleNamespace(id=secrets.token_hex(4), spec=spec) for _ in range(3)]
    computed: list[JobSpec] = []

    def broker_bytes(its: JobSpec) -> int:
        computed.append(its)
        return 1000

    monkeypatch.setattr(JobSpec, "broker_bytes", property(broker_bytes))
    publisher = Publisher(Mock())
    publisher.look(redis, jobs)
    publisher.look(redis, jobs)
    assert len(computed) == 3
    publisher.look(redis, jobs[:1])
    assert [job_id for job_id, _ in publisher._needed] == [jobs[0].id]
