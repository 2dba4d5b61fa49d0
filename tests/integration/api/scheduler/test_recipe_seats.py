"""Jobs that train a recipe: only workers whose owners agreed get seats, and one that fails everywhere is given up."""

from collections.abc import Callable

import pytest
from redis import Redis
from sqlalchemy import insert, update

from api.database import Database
from api.jobs.service import Jobs
from api.projection.projector import Projector
from api.scheduler.dispatcher import Dispatcher
from api.tables import JOB, Event, table
from computeshare.protocol.keys import JobKeys
from computeshare.queue import list_workers
from computeshare.queue.seats import RECIPE_FAILED
from tests.support.event_stream import Feed
from tests.support.recipe_jobs import RECIPE, recipe_spec
from tests.support.scheduling_clock import Clock, online, seats, set_rq_status

OTHER = "sha256:" + "c3" * 32
LINE = "recipe.py, line 7: training failed: ValueError: no such thing"


class Stage:
    """A job that trains a recipe, turns of the dispatcher, and seats that fail in training."""

    def __init__(
        self, redis: Redis, dispatcher: Dispatcher, database: Database, clock: Clock, job: str, queue: str
    ) -> None:
        self.redis, self.dispatcher, self.database, self.clock, self.job = redis, dispatcher, database, clock, job
        self.feed = Feed(redis, job, recipe_spec().plan)
        redis.set(JobKeys(job).reducer(), "1|host|1|id")
        with database.writing() as connection:
            changed = recipe_spec(queue=queue, rounds=50).model_dump(mode="json")
            connection.execute(update(JOB).where(JOB.c.id == job).values(spec=changed))

    def turn(self, seconds: int = 1) -> None:
        self.dispatcher.step(self.redis)
        self.clock.ms += 1000 * seconds
        self.feed.at_ms = self.clock.ms

    def advance(self) -> None:
        """There is a new version."""
        with self.database.writing() as connection:
            about = {"job_id": self.job, "type": "version", "at_ms": self.clock.ms, "data": {}}
            connection.execute(insert(table(Event)).values(about))

    def fail(self, line: str = LINE, joins: bool = True) -> list[str]:
        """Every seat that was handed out fails, before or after it `joins`; returns their workers."""
        mine = seats(self.database, "issued")
        for seat in mine:
            about = {"name": f"mac-{seat.worker}", "device": "cpu"}
            if joins:
                self.feed.send("joined", worker=seat.worker, session=seat.id, seat=seat.id, **about)
            self.feed.send("left", worker=seat.worker, session=seat.id, reason=RECIPE_FAILED + line, freed=[])
            set_rq_status(self.redis, seat.id, "failed")
        Projector(self.database).step(self.redis)
        return [seat.worker for seat in mine]


@pytest.fixture
def stage(
    redis: Redis, dispatcher: Dispatcher, database: Database, clock: Clock, create: Callable[..., str], queue: str
) -> Stage:
    return Stage(redis, dispatcher, database, clock, create(), queue)


def test_only_workers_whose_owners_agreed_get_seats(stage: Stage, redis: Redis, queue: str, database: Database) -> None:
    online(redis, queue)
    online(redis, queue, recipes=(OTHER,))
    willing = {online(redis, queue, recipes=("*",)), online(redis, queue, recipes=(OTHER, RECIPE))}
    stage.turn()
    assert {seat.worker for seat in seats(database)} == willing


def test_a_job_without_willing_workers_says_which_option_their_owners_must_give(
    stage: Stage, redis: Redis, queue: str, jobs: Jobs, database: Database
) -> None:
    first, second = online(redis, queue), online(redis, queue, recipes=(OTHER,))
    stage.turn()
    told = str(jobs.show(stage.job).reason)
    option = f"start it with --recipes, or with --recipe {RECIPE}"
    assert f"mac-{first} runs no recipes: {option}" in told
    assert f"mac-{second} runs other recipes: {option}" in told
    assert not seats(database)


def test_what_owners_agreed_to_survives_the_broker(redis: Redis, queue: str) -> None:
    mine = online(redis, queue, recipes=(OTHER, RECIPE))
    assert [worker.recipes for worker in list_workers(redis) if worker.id == mine] == [(OTHER, RECIPE)]


@pytest.mark.parametrize("joins", [True, False], ids=["in training", "in its set-up"])
@pytest.mark.slow
def test_a_recipe_that_fails_everywhere_is_tried_ever_less_often_and_then_given_up(
    stage: Stage, redis: Redis, queue: str, jobs: Jobs, joins: bool
) -> None:
    worker = online(redis, queue, recipes=("*",))
    failed = []
    for second in range(120):
        online(redis, queue, worker=worker, recipes=("*",))
        stage.turn()
        if stage.fail(joins=joins):
            failed.append(second)
            stage.turn()
            if len(failed) < 3:
                assert f"the recipe failed on mac-{worker}: {LINE}" in str(jobs.show(stage.job).reason)
    assert len(failed) == 3 and failed[1] - failed[0] >= 9 and failed[2] - failed[1] >= 29
    Projector(stage.database).step(redis)
    shown = jobs.show(stage.job)
    assert shown.status == "failed"
    told = f"The recipe failed on every machine that tried it (1), last on mac-{worker}: {LINE}. Mend it"
    assert str(shown.error).startswith(told)


def test_a_recipe_that_fails_on_three_workers_is_given_up_though_more_have_not_tried_it(
    stage: Stage, redis: Redis, queue: str, jobs: Jobs
) -> None:
    for _ in range(3):
        online(redis, queue, recipes=("*",))
    stage.turn()
    assert len(stage.fail(joins=False)) == 3
    for _ in range(3):
        online(redis, queue, recipes=("*",))
    stage.turn()
    Projector(stage.database).step(redis)
    assert "(3), last on mac-" in str(jobs.show(stage.job).error)


def test_a_new_version_forgives_earlier_failures(stage: Stage, redis: Redis, queue: str, jobs: Jobs) -> None:
    worker, failed = online(redis, queue, recipes=("*",)), 0
    for _ in range(100):
        online(redis, queue, worker=worker, recipes=("*",))
        stage.turn()
        if stage.fail():
            failed += 1
            stage.advance()
    assert failed > 3 and jobs.show(stage.job).status == "running"


def test_a_recipe_that_cannot_be_scored_says_so_while_it_trains(
    stage: Stage, redis: Redis, queue: str, jobs: Jobs
) -> None:
    worker = online(redis, queue, recipes=("*",))
    stage.turn()
    for seat in seats(stage.database, "issued"):
        stage.feed.send("joined", worker=worker, session=seat.id, seat=seat.id, name="mac", device="cpu")
        set_rq_status(redis, seat.id, "started")
    Projector(stage.database).step(redis)
    redis.hset(JobKeys(stage.job).round(), "status", "running")
    with stage.database.writing() as connection:
        event = {"job_id": stage.job, "type": "unscored", "at_ms": 1, "data": {"version": 1, "error": "LINE 7"}}
        connection.execute(insert(table(Event)).values(event))
    online(redis, queue, worker=worker, recipes=("*",))
    stage.turn()
    assert "a version cannot be scored: LINE 7" in str(jobs.show(stage.job).reason)
