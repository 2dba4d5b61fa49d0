"""Jobs that require or prefer something of a machine: who gets their seats, and what is said where nobody can."""

import secrets
from collections.abc import Callable

import pytest
from redis import Redis
from starlette.testclient import TestClient

from api.broker import Broker
from api.database import Database
from api.fleet.service import Fleet
from api.jobs.service import Jobs
from api.scheduler.dispatcher import Dispatcher
from computeshare.queue import WorkerInfo, list_workers, register, unregister
from computeshare.settings import Settings
from tests.support.scheduling_clock import seats
from tests.support.wait import wait_until


@pytest.fixture
def attach(redis: Redis, queue: str) -> Callable[..., str]:
    """Registers a worker with 4 GB and these labels."""

    def attach(name: str, memory: int = 4 * 10**9, device: str = "cpu", limit: int = 0, **labels: str) -> str:
        worker = secrets.token_hex(6)
        about = {"max_memory_bytes": limit, "labels": labels}
        register(redis, WorkerInfo(worker, name, device, (queue,), {}, memory, "host", 1, **about))  # type: ignore[arg-type]
        return worker

    return attach


def test_labels_survive_the_broker_and_those_that_are_none_are_cut(redis: Redis, attach: Callable[..., str]) -> None:
    labels = {f"n{number}" + "x" * 60: "v" * 64 for number in range(16)}
    mine = attach("mac", limit=2 * 10**9, **labels)
    (found,) = [one for one in list_workers(redis) if one.id == mine]
    assert found.labels == labels
    assert (found.machine.memory_bytes, found.machine.labels) == (2 * 10**9, labels)
    attach("liar", **{f"n{number}": "x" for number in range(20)})
    assert all(len(one.labels) <= 16 for one in list_workers(redis))


def test_a_job_gets_seats_only_where_it_finds_what_it_requires(
    redis: Redis, dispatcher: Dispatcher, database: Database, attach: Callable[..., str], create: Callable[..., str]
) -> None:
    attach("small", room="attic")
    attach("below", memory=16 * 10**9, room="cellar")
    attach("limited", memory=16 * 10**9, limit=2 * 10**9, room="attic")
    fits = attach("fits", memory=16 * 10**9, room="attic")
    create(requires={"memory": "8GB", "labels": {"room": "attic"}}, workers={"min": 1, "max": 4})
    dispatcher.step(redis)
    assert [seat.worker for seat in seats(database)] == [fits]


def test_a_job_that_nobody_can_serve_says_what_is_missing_until_somebody_can(
    redis: Redis,
    dispatcher: Dispatcher,
    database: Database,
    jobs: Jobs,
    queue: str,
    attach: Callable[..., str],
    create: Callable[..., str],
    settings: Settings,
) -> None:
    job = create(requires={"memory": "8GB", "labels": {"room": "attic"}})
    needs = f"Needs 1 worker on queue {queue} with 8.0 GB of memory and label room=attic"
    dispatcher.step(redis)
    assert jobs.show(job).reason == f"{needs}, 0 are online"
    small = attach("small")
    attach("below", room="cellar")
    dispatcher.step(redis)
    assert jobs.show(job).reason == (
        f"{needs}, 2 are online; no worker has label room=attic; the largest has 4.0 GB for a job"
    )
    (shown,) = [one for one in Fleet(database, Broker(settings)).workers().items if one.id == small]
    assert shown.left_out == [
        f"Job {job}: small cannot take part: it has 4.0 GB of memory for a job, not 8.0 GB and has no label room=attic"
    ]
    unregister(redis, small)  # and is started again with another label: a worker of another id
    again = attach("small", memory=9 * 10**9, room="attic")
    dispatcher.step(redis)
    assert [seat.worker for seat in seats(database)] == [again]


def test_a_job_with_too_few_that_fit_names_those_that_do_not(
    redis: Redis, dispatcher: Dispatcher, jobs: Jobs, queue: str, attach: Callable[..., str], create: Callable[..., str]
) -> None:
    attach("studio", device="mps")
    attach("pc", device="cuda:0")
    job = create(requires={"device": "cuda"}, workers={"min": 2, "max": 2})
    dispatcher.step(redis)
    assert jobs.show(job).reason == (
        f"Needs 2 workers on queue {queue} with device cuda, 2 are online; "
        "studio cannot take part: it computes with mps, not cuda"
    )


def test_of_the_free_workers_those_preferred_get_the_seats_and_the_others_when_there_are_no_more(
    redis: Redis, dispatcher: Dispatcher, database: Database, attach: Callable[..., str], create: Callable[..., str]
) -> None:
    others = {attach("other"), attach("one more")}
    liked = attach("liked", memory=16 * 10**9, room="attic")
    create(prefers={"memory": "8GB", "labels": {"room": "attic"}}, workers={"min": 1, "max": 1})
    dispatcher.step(redis)
    assert [seat.worker for seat in seats(database)] == [liked]
    create(prefers={"labels": {"room": "attic"}}, workers={"min": 2, "max": 2})
    dispatcher.step(redis)
    assert {seat.worker for seat in seats(database)} == others | {liked}


def test_what_a_job_requires_can_be_changed_while_it_waits(
    redis: Redis,
    dispatcher: Dispatcher,
    database: Database,
    client: TestClient,
    attach: Callable[..., str],
    create: Callable[..., str],
) -> None:
    worker, job = attach("mac", room="attic"), create(requires={"labels": {"room": "cellar"}})
    dispatcher.step(redis)
    assert not seats(database)
    answer = client.patch(f"/v1/jobs/{job}", json={"requires": {"labels": {"room": "attic"}}})
    assert answer.json()["spec"]["requires"] == {"memory": None, "device": None, "labels": {"room": "attic"}}
    wait_until(lambda: seats(database))  # by the control plane of the client
    assert {seat.worker for seat in seats(database)} == {worker}
