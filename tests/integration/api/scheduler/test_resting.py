"""Workers that rest by their owner's wish: no seat, a reason that says so, and words that are not trusted."""

import secrets
from collections.abc import Callable
from dataclasses import replace

import pytest
from redis import Redis
from starlette.testclient import TestClient

from api.database import Database
from api.jobs.service import Jobs
from api.scheduler.dispatcher import Dispatcher
from computeshare.host.rest_policy import UNKNOWN, Power
from computeshare.protocol import keys
from computeshare.queue import list_workers, register, unregister
from computeshare.queue.roster import WorkerInfo
from tests.support.scheduling_clock import Clock, online, queued, seats, set_rq_status


def rest(redis: Redis, worker: str, why: str) -> WorkerInfo:
    """Have a worker that is online say that it rests, or works again where there is no reason."""
    (info,) = [found for found in list_workers(redis) if found.id == worker]
    said = replace(info, resting=why, power=Power(False, 29.5))
    register(redis, said)
    return said


def test_a_resting_worker_gets_no_seat_until_it_works_again_and_the_job_says_why(
    redis: Redis, dispatcher: Dispatcher, database: Database, jobs: Jobs, queue: str, create: Callable[..., str]
) -> None:
    worker = online(redis, queue)
    rest(redis, worker, "on battery until 50 %")
    job = create()
    dispatcher.step(redis)
    assert seats(database) == []
    told = f"Needs 1 worker on queue {queue}, 1 is online; 1 resting: on battery until 50 %"
    assert jobs.show(job).reason == told
    rest(redis, worker, "")
    dispatcher.step(redis)
    assert [seat.worker for seat in seats(database, "issued")] == [worker]
    assert jobs.show(job).reason != told


def test_a_seat_that_a_resting_worker_has_begun_is_left_to_end_politely_and_one_it_has_not_is_taken_back(
    redis: Redis, dispatcher: Dispatcher, database: Database, queue: str, create: Callable[..., str], clock: Clock
) -> None:
    begun, waiting = online(redis, queue), online(redis, queue)
    create()
    dispatcher.step(redis)
    of = {seat.worker: seat for seat in seats(database, "issued")}
    set_rq_status(redis, of[begun].id, "started")
    online(redis, queue, of[begun].id, begun)
    for worker in (begun, waiting):
        rest(redis, worker, "outside its hours until 22:00")
    dispatcher.step(redis)
    after = {seat.worker: seat.state for seat in seats(database)}
    assert after == {begun: "issued", waiting: "stopped"} and queued(redis, waiting) == []
    set_rq_status(redis, of[begun].id, "finished")
    online(redis, queue, None, begun)
    rest(redis, begun, "outside its hours until 22:00")
    clock.ms += 60_000
    dispatcher.step(redis)
    assert len(seats(database)) == 2 and not seats(database, "issued", "pending")


def test_rest_shows_power_and_why_a_worker_rests(client: TestClient, redis: Redis, queue: str) -> None:
    resting, plain = online(redis, queue), online(redis, queue)
    rest(redis, resting, "on battery until it is plugged in")
    shown = {worker["id"]: worker for worker in client.get("/v1/workers").json()["items"]}
    assert shown[resting]["resting"] == "on battery until it is plugged in"
    assert shown[resting]["power"] == {"plugged": False, "percent": 29.5}
    assert (shown[plain]["resting"], shown[plain]["power"]) == (None, {"plugged": None, "percent": None})
    for worker in (resting, plain):
        unregister(redis, worker)


@pytest.mark.parametrize(
    ("power", "meant"),
    [
        ('{"plugged": true, "percent": 80}', Power(True, 80.0)),
        ('{"plugged": "yes", "percent": "80"}', UNKNOWN),
        ('{"plugged": 1, "percent": true}', UNKNOWN),
        ('{"plugged": false, "percent": 1e400}', Power(False)),
        ('{"percent": NaN}', UNKNOWN),
        ('{"percent": -1}', UNKNOWN),
        ("{}", UNKNOWN),
    ],
    ids=str,
)
def test_what_a_worker_says_of_its_power_is_taken_as_far_as_it_makes_sense(
    redis: Redis, queue: str, power: str, meant: Power
) -> None:
    worker = online(redis, queue)
    redis.hset(keys.worker(worker), mapping={"power": power, "resting": "\x1b[2J\n" + "x" * 5000})
    (found,) = [w for w in list_workers(redis) if w.id == worker]
    assert found.power == meant
    assert len(found.resting) == 200 and found.resting.isprintable()
    unregister(redis, worker)


@pytest.mark.parametrize("power", ["", "[]", "null", "{", "7"])
def test_a_worker_that_talks_nonsense_is_none(redis: Redis, queue: str, power: str) -> None:
    worker = online(redis, queue)
    redis.hset(keys.worker(worker), "power", power)
    assert worker not in [found.id for found in list_workers(redis)]
    unregister(redis, worker)


def test_a_worker_of_before_says_neither_and_works(redis: Redis, queue: str) -> None:
    worker = online(redis, queue, worker=secrets.token_hex(6))
    redis.hdel(keys.worker(worker), "power", "resting")
    (found,) = [w for w in list_workers(redis) if w.id == worker]
    assert (found.resting, found.power) == ("", UNKNOWN)
    unregister(redis, worker)
