"""Each page is read in one transaction of the database, so that its parts agree with one another."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from redis import Redis
from sqlalchemy import event
from starlette.testclient import TestClient

from api.deps import Services
from api.main import create_app
from computeshare.jobspec.spec import JobSpec
from computeshare.queue import WorkerInfo, register
from computeshare.settings import Settings

SPEC = JobSpec(dataset="digits", model="mlp", rounds=30)


@pytest.fixture
def services(settings: Settings) -> Iterator[tuple[TestClient, Services]]:
    """A control plane without its background loops: only requests read."""
    app = create_app(settings)
    services: Services = app.state.services
    services.database.migrate()
    yield TestClient(app, base_url="http://localhost", headers={"Authorization": "Bearer secret"}), services
    services.broker.close()
    services.database.close()


@pytest.mark.parametrize(
    "page",
    [
        "/",
        "/jobs/{one}",
        "/jobs/{one}/data",
        "/jobs/{one}/parts?table=true",
        "/jobs/{one}/submissions",
        "/jobs/{one}/timeline",
        "/compare?job={one}&job={other}",
        "/compare/data?job={one}&job={other}",
        "/v1/compare?job={one}&job={other}",
        "/workers",
        "/new",
        "/new?from={one}",
        "/webhooks",
        "/datasets",
        "/new?dataset=birds",
    ],
)
def test_a_page_is_read_in_one_transaction(page: str, services: tuple[TestClient, Services], redis: Redis) -> None:
    client, behind = services
    one, other = (behind.jobs.create(SPEC).id for _ in range(2))
    for number, job_id in enumerate((one, other)):
        worker = WorkerInfo(f"pageworker{number}", "here", "cpu", ("default",), {}, 8 * 10**9, "host", number)
        register(redis, replace(worker, seat=f"{worker.id}-{job_id}-0-1"))
    begun: list[object] = []
    event.listen(behind.database.engine, "begin", begun.append)
    assert client.get(page.format(one=one, other=other)).status_code == 200
    assert len(begun) == 1


def test_reading_within_reading_sees_the_same_moment(services: tuple[TestClient, Services]) -> None:
    jobs, database = services[1].jobs, services[1].database
    with database.read():
        before = jobs.list().items
        job = jobs.create(SPEC)
        assert jobs.list().items == before == []
    assert jobs.list().items == [job]


def test_scores_by_class_are_read_with_their_job(services: tuple[TestClient, Services]) -> None:
    client, behind = services
    one, begun = behind.jobs.create(SPEC).id, list[object]()
    event.listen(behind.database.engine, "begin", begun.append)
    assert client.get(f"/jobs/{one}/classes").status_code == 404  # no version has been scored yet
    assert len(begun) == 1
