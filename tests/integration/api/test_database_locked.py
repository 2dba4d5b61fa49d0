"""Another process that holds the database longer than anyone waits for it."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from redis import Redis
from starlette.testclient import TestClient

from api import database
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol.round_store import RoundStore
from computeshare.settings import Settings
from tests.support.event_stream import Feed
from tests.support.scheduling_clock import online
from tests.support.wait import wait_until

SPEC = JobSpec(dataset="digits", model="mlp", rounds=30, queue="locked")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_MS", 200)


@contextmanager
def locked(home: Path) -> Iterator[None]:
    other = sqlite3.connect(home / "computeshare.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.execute("ROLLBACK")
        other.close()


@pytest.mark.slow
def test_a_locked_database_is_a_503_and_everything_goes_on_after_it(
    redis: Redis, client: TestClient, settings: Settings
) -> None:
    online(redis, SPEC.queue)
    body = SPEC.model_dump(mode="json", exclude={"epochs"})
    job = client.post("/v1/jobs", json=body).json()["id"]
    wait_until(lambda: RoundStore(redis, job).spec() is not None)
    loops = client.app.state.services.control.loops  # type: ignore[attr-defined]
    feed = Feed(redis, job, SPEC.plan)
    with locked(settings.home):
        feed.open()
        feed.join()
        for _ in range(12):
            feed.commit()
        for call in (lambda: client.post("/v1/jobs", json=body), lambda: client.post(f"/v1/jobs/{job}/pause")):
            answer = call()
            assert (answer.status_code, answer.headers["content-type"]) == (503, "application/problem+json")
            assert int(answer.headers["retry-after"]) >= 1 and "locked" in answer.json()["detail"]
        assert client.get(f"/v1/jobs/{job}").json()["version"] == 0  # reading works
        wait_until(lambda: any(loop.failures for loop in loops))
        ready = client.get("/readyz")
        assert ready.status_code == 503 and "locked" in ready.json()["dependencies"]["sqlite"]["detail"]
    wait_until(lambda: client.get(f"/v1/jobs/{job}").json()["version"] == 12)
    ledger = client.get(f"/v1/jobs/{job}/ledger").json()["epochs"]
    assert [(epoch["counted"], epoch["missing"]) for epoch in ledger] == [(1437, 0)]
    assert [item["id"] for item in client.get("/v1/jobs").json()["items"]] == [job]
    assert client.post(f"/v1/jobs/{job}/pause").status_code == 202
    wait_until(lambda: client.get("/readyz").status_code == 200)
