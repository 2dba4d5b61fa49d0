"""A disk that fills up, for real: jobs rest until there is room, the API says when to ask again, nothing is lost."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from starlette.testclient import TestClient

from api.database import Database
from api.jobs.history import History
from api.jobs.service import Jobs
from api.main import create_app
from api.projection.projector import Projector
from api.scheduler.dispatcher import Dispatcher
from computeshare.checkpoints.store import Artifacts
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol.round_store import RoundStore
from computeshare.reducer import job_reducer, round_handler
from computeshare.runtime.durability import Disk
from computeshare.settings import Settings
from tests.support.event_stream import Feed
from tests.support.full_disk import fill, read_only, small_disk
from tests.support.job_reducer import Job, spec_of
from tests.support.rounds import take_seat
from tests.support.wait import wait_until


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 8) as disk:
        yield disk


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reducers try a disk again at once."""
    monkeypatch.setattr(job_reducer, "DISK_RETRY_S", 0.0)


def written(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}


def advance_until(job: Job, true: Callable[[], bool]) -> None:
    for _ in range(1000):
        if true():
            return
        job.reducer.advance()
    raise AssertionError("this never came true")


def held(job: Job) -> list[str]:
    entries: Any = job.redis.xrange(job.store.keys.events())
    return [json.loads(f[b"data"])["reason"] for _, f in entries if f[b"type"] == b"held"]


@pytest.mark.usefixtures("impatient")
def test_a_job_whose_checkpoint_finds_no_room_rests_and_then_goes_on_to_the_same_bits(
    redis: Redis, tmp_path: Path, disk: Path, database: Database, jobs: Jobs, dispatcher: Dispatcher
) -> None:
    calm = Job(redis, "calm0000", spec_of(), tmp_path)
    expected = calm.finish(calm.hand("solo"))
    job_id = jobs.create(spec_of()).id
    job, projector = Job(redis, job_id, spec_of(), disk), Projector(database)
    hand = job.hand("solo")
    projector.step(redis)
    for _ in range(2):
        job.round(hand)
    ballast = fill(disk)
    before = written(disk)
    job.round(hand)  # version 3 is to be kept
    advance_until(job, lambda: bool(held(job)))
    assert "No space left on device" in held(job)[0] and "0 MB are free" in held(job)[0]
    assert written(disk) == before  # nothing half-written, nothing gone
    projector.step(redis)
    shown = jobs.show(job_id)
    assert shown.status == "paused" and "Make room there, then resume" in str(shown.reason)
    dispatcher.step(redis)
    assert job.store.status() == "paused"
    count = len(held(job))
    for _ in range(3):
        assert job.reducer.advance()
    assert len(held(job)) == count and jobs.show(job_id).error is None
    jobs.resume(job_id)  # too early: it rests again
    dispatcher.step(redis)
    advance_until(job, lambda: len(held(job)) > count)
    projector.step(redis)
    dispatcher.step(redis)
    assert jobs.show(job_id).status == "paused"
    ballast.unlink()
    jobs.resume(job_id)
    dispatcher.step(redis)
    state = job.store.read()
    assert state is not None and (state.status, state.version) == ("running", 3)
    take_seat(hand.session)
    assert job.finish(hand) == expected
    assert [token.version for token in Artifacts(disk, job_id).tokens()] == [3, 6]


@pytest.mark.usefixtures("impatient")
def test_the_last_checkpoint_is_written_once_there_is_room_and_never_given_up(
    redis: Redis, job_id: str, disk: Path
) -> None:
    job = Job(redis, job_id, spec_of(rounds=2), disk)
    hand = job.hand("solo")
    ballast = fill(disk)
    for _ in range(2):
        job.round(hand)
    for _ in range(3):
        assert job.reducer.advance()  # it does not let the job go
    assert held(job) and Artifacts(disk, job_id).tokens() == []
    ballast.unlink()
    advance_until(job, lambda: job.store.status() == "finished")
    assert not job.reducer.advance()
    assert Artifacts(disk, job_id).tokens()[-1].version == 2


@pytest.mark.usefixtures("impatient")
def test_a_job_that_cannot_even_begin_for_want_of_room_begins_once_there_is_some(
    redis: Redis, job_id: str, disk: Path
) -> None:
    ballast = fill(disk)
    store = RoundStore(redis, job_id)
    job = Job(redis, job_id, spec_of(rounds=2), disk)
    assert store.read() is None and held(job)
    ballast.unlink()
    assert job.reducer.advance()
    assert store.status() == "running"


@pytest.mark.usefixtures("impatient")
def test_a_job_on_a_disk_that_turned_read_only_is_not_told_to_make_room(redis: Redis, job_id: str, disk: Path) -> None:
    job = Job(redis, job_id, spec_of(rounds=3), disk)
    hand = job.hand("solo")
    job.round(hand)
    with read_only(disk):
        for _ in range(2):
            job.round(hand)
        advance_until(job, lambda: bool(held(job)))
        assert f"the disk of {disk} is read-only. Mount it for writing, then resume the job" in held(job)[-1]
        assert "room" not in held(job)[-1] and "MB" not in held(job)[-1]
    advance_until(job, lambda: job.store.status() == "finished")
    assert not job.reducer.advance()
    assert Artifacts(disk, job_id).tokens()[-1].version == 3


def test_a_disk_with_room_for_the_weights_but_not_for_the_optimizers_state_is_full(
    redis: Redis, job_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(redis, job_id, spec_of(rounds=50, checkpoint_every=1), tmp_path)
    hand, artifacts = job.hand("solo"), Artifacts(tmp_path, job_id)
    job.round(hand)
    weights, handler = 4 * hand.layout.parameters, job.reducer.handler
    advance_until(job, lambda: bool(artifacts.tokens()) and not job.reducer.checkpoints.is_writing)
    assert artifacts.newest_bytes() > 3 * weights and handler
    for room, is_full in ((2 * weights, True), (9 * weights, False)):
        monkeypatch.setattr(round_handler.Disk, "of", lambda folder, room=room: Disk(folder, room, False))
        monkeypatch.setattr(round_handler, "DISK_CHECK_S", 0.0)
        assert handler._disk_is_full() == is_full


@pytest.mark.usefixtures("impatient")
def test_a_full_disk_is_noticed_before_a_checkpoint_is_due(
    redis: Redis, job_id: str, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_handler, "DISK_CHECK_S", 0.0)
    job = Job(redis, job_id, spec_of(rounds=50, checkpoint_every=0), disk)
    hand = job.hand("solo")
    job.round(hand)
    assert not held(job) and Artifacts(disk, job_id).tokens() == []
    fill(disk)
    job.round(hand)
    advance_until(job, lambda: bool(held(job)))
    assert "0 MB are free" in held(job)[0]


SPEC: dict[str, Any] = {"dataset": "digits", "model": "mlp", "rounds": 30}


def test_a_full_disk_under_the_database_is_a_503_and_nothing_is_lost(redis: Redis, redis_url: str, disk: Path) -> None:
    app = create_app(Settings(home=disk, redis_url=redis_url, token="secret"))
    headers = {"Authorization": "Bearer secret"}
    with TestClient(app, base_url="http://localhost", headers=headers, raise_server_exceptions=False) as client:
        first = client.post("/v1/jobs", json=SPEC).json()["id"]
        ballast = fill(disk)
        answers = [client.post("/v1/jobs", json={**SPEC, "name": "x" * 90}) for _ in range(50)]
        refused = [answer for answer in answers if answer.status_code != 201]
        made = {answer.json()["id"] for answer in answers if answer.status_code == 201}
        assert refused and {answer.status_code for answer in refused} == {503}
        assert all(int(answer.headers["retry-after"]) >= 1 and "full" in answer.json()["detail"] for answer in refused)
        feed = Feed(redis, first, JobSpec.model_validate(SPEC).plan)
        feed.open()
        feed.join()
        for _ in range(20):
            feed.commit()
        shown = client.get(f"/v1/jobs/{first}").json()
        assert shown["status"] in ("queued", "running")  # nobody can write anything else
        assert f"No checkpoint can be written: 0 MB are free in {disk}" in shown["reason"]
        listed = {job["id"]: job["reason"] for job in client.get("/v1/jobs", params={"limit": 100}).json()["items"]}
        assert listed[first] == shown["reason"]
        ballast.unlink()
        services = app.state.services
        wait_until(lambda: services.jobs.show(first).version == 20)
        assert "No checkpoint" not in str(services.jobs.show(first).reason)
        assert client.post("/v1/jobs", json=SPEC).status_code == 201
        listed = {job["id"] for job in client.get("/v1/jobs", params={"limit": 100}).json()["items"]}
        assert made < listed and len(listed) == len(made) + 2
        ledger = History(services.database, disk).ledger(first).epochs
        assert [(epoch.counted, epoch.missing) for epoch in ledger] == [(epoch.samples, 0) for epoch in ledger]
