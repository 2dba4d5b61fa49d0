"""A ban holds whatever the broker forgets, until a user lifts it."""

from collections.abc import Callable

import pytest
from redis import Redis
from sqlalchemy import select
from starlette.testclient import TestClient

from api.database import Database, now_ms
from api.errors import Conflict, NotFound
from api.fleet.invites import Introduction, InviteService
from api.jobs.history import History
from api.jobs.service import Jobs
from api.projection.projector import Projector
from api.publication.outbox import Courier
from api.scheduler.bans import Bans
from api.scheduler.dispatcher import Dispatcher
from api.scheduler.machines import Roll, confined
from api.tables import WORKER
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol.keys import JobKeys
from computeshare.protocol.round_store import RoundStore
from computeshare.queue import WorkerInfo, register, unregister
from computeshare.runtime.signatures import SigningKey
from computeshare.types import machine_of
from computeshare.worker.invite import introduction
from tests.support.event_stream import WORKERS, Feed
from tests.support.scheduling_clock import Clock, Killed, dying, online, queued, seats

PLAN = JobSpec(dataset="digits", model="mlp").plan
LIAR, HONEST = WORKERS


def ban(feed: Feed, strikes: int = 5) -> None:
    """What the script writes and leaves behind when a worker's last strike bans it."""
    for number in range(strikes):
        feed.submit(number, LIAR, nonce=f"n{number}")
        feed.send(
            "refused", worker=LIAR, nonce=f"n{number}", base="", micro_batch=number, reason="checksum", strike=True
        )
    feed.redis.hset(feed.keys.banned(), LIAR, "checksum")
    feed.redis.hset(feed.keys.strikes(), machine_of(LIAR), strikes)
    feed.send("banned", worker=LIAR, session="s1", strikes=strikes, reason="checksum")


@pytest.fixture
def job(redis: Redis, database: Database, dispatcher: Dispatcher, create: Callable[..., str], queue: str) -> str:
    """One from which the worker LIAR was banned; both workers are online."""
    job = create(workers={"min": 1, "max": 4})
    dispatcher._courier.publish(redis, job)
    feed = Feed(redis, job, PLAN)
    feed.open()
    feed.join(LIAR, "liar")
    ban(feed)
    Projector(database).step(redis)
    for worker in WORKERS:
        online(redis, queue, worker=worker)
    return job


@pytest.fixture
def bans(database: Database) -> Bans:
    return Bans(database)


def test_a_banned_worker_is_shown_with_its_strikes_and_gets_no_seat(
    redis: Redis, dispatcher: Dispatcher, database: Database, history: History, job: str
) -> None:
    shown = history.worker(job, LIAR)
    assert (shown.banned, shown.strikes, shown.active) == ("checksum", 5, False)
    dispatcher.step(redis)
    assert [seat.worker for seat in seats(database)] == [HONEST]


def test_the_reason_says_that_only_banned_workers_are_left(
    redis: Redis, dispatcher: Dispatcher, jobs: Jobs, job: str, queue: str
) -> None:
    redis.delete(f"cs:worker:{HONEST}")
    dispatcher.step(redis)
    assert jobs.show(job).reason == (
        f"Needs 1 worker on queue {queue}, 1 is online; "
        f"liar is banned (checksum): lift the ban with computeshare jobs unban {job} {LIAR}"
    )


def test_a_lifted_ban_is_forgotten_by_the_broker_too_and_seats_come_again(
    redis: Redis, dispatcher: Dispatcher, database: Database, history: History, bans: Bans, job: str
) -> None:
    bans.lift(job, LIAR)
    shown = history.worker(job, LIAR)
    assert (shown.banned, shown.strikes) == (None, 0)
    dispatcher.step(redis)
    assert redis.hlen(JobKeys(job).banned()) == redis.hlen(JobKeys(job).strikes()) == 0
    assert sorted(seat.worker for seat in seats(database)) == sorted(WORKERS)
    assert history.timeline(job)[0].type in ("unbanned", "joined")
    assert [e.data for e in history.timeline(job) if e.type == "unbanned"] == [{"worker": LIAR, "by": "a user"}]


def test_a_ban_stays_with_the_machine_when_its_worker_starts_anew_until_it_is_lifted_there(
    redis: Redis,
    dispatcher: Dispatcher,
    database: Database,
    history: History,
    bans: Bans,
    jobs: Jobs,
    job: str,
    queue: str,
    clock: Clock,
) -> None:
    dispatcher.step(redis)
    unregister(redis, LIAR)
    clock.ms += 1000
    dispatcher.step(redis)
    again = WorkerInfo("c" * 12, f"mac-{LIAR}", "cpu", (queue,), {}, 1, "host", 2)
    register(redis, again)
    for _ in range(15):
        clock.ms += 1000
        dispatcher.step(redis)
    assert [seat.worker for seat in seats(database, "issued")] == [HONEST]
    before, after = history.worker(job, LIAR), history.worker(job, again.id)
    assert (before.banned, before.strikes, before.refused) == (None, 0, 5)
    assert (after.banned, after.strikes, after.active, after.name) == ("checksum", 5, False, "liar")
    bans.lift(job, again.id)
    dispatcher.step(redis)
    assert sorted(seat.worker for seat in seats(database, "issued")) == sorted([HONEST, again.id])
    assert history.worker(job, again.id).banned is None
    assert jobs.show(job).reason is None or "banned" not in jobs.show(job).reason


def test_a_ban_leaves_out_all_workers_of_its_machine_until_it_is_lifted(
    redis: Redis, dispatcher: Dispatcher, database: Database, bans: Bans, job: str, queue: str
) -> None:
    other = LIAR[:8] + "0123"  # the ids of an invited machine's workers begin alike
    online(redis, queue, worker=other)
    dispatcher.step(redis)
    assert [seat.worker for seat in seats(database)] == [HONEST]
    bans.lift(job, LIAR)
    dispatcher.step(redis)
    assert sorted(seat.worker for seat in seats(database)) == sorted([*WORKERS, other])


def test_only_a_ban_that_there_is_can_be_lifted(bans: Bans, job: str) -> None:
    for wrong in ("nobody", ""):
        with pytest.raises(NotFound):
            bans.lift(job, wrong)
    with pytest.raises(NotFound):
        bans.lift("nojob", LIAR)
    bans.lift(job, LIAR)
    with pytest.raises(Conflict, match="not banned"):
        bans.lift(job, LIAR)


@pytest.mark.parametrize("lost", ["all", "the ban alone"])
def test_a_broker_that_loses_the_ban_does_not_free_the_worker(
    lost: str, redis: Redis, dispatcher: Dispatcher, database: Database, job: str, clock: Clock
) -> None:
    if lost == "all":
        RoundStore(redis, job).purge()
    else:
        redis.delete(JobKeys(job).banned(), JobKeys(job).strikes())
    for _ in range(3):
        clock.ms += 1000
        dispatcher.step(redis)
    assert [seat.worker for seat in seats(database)] == [HONEST]
    if lost == "all":
        assert redis.hgetall(JobKeys(job).banned()) == {LIAR.encode(): b"checksum"}


def test_a_ban_that_was_lifted_before_the_broker_was_lost_stays_lifted(
    redis: Redis, dispatcher: Dispatcher, bans: Bans, job: str, clock: Clock
) -> None:
    bans.lift(job, LIAR)
    RoundStore(redis, job).purge()
    for _ in range(3):
        clock.ms += 1000
        dispatcher.step(redis)
    assert RoundStore(redis, job).spec() is not None
    assert redis.hlen(JobKeys(job).banned()) == 0


def test_a_ban_that_came_after_it_was_lifted_is_not_lifted_by_a_late_delivery(
    redis: Redis, dispatcher: Dispatcher, database: Database, bans: Bans, job: str, history: History
) -> None:
    bans.lift(job, LIAR)
    ban(Feed(redis, job, PLAN))
    Projector(database).step(redis)
    dispatcher.step(redis)
    assert history.worker(job, LIAR).banned == "checksum"
    assert redis.hget(JobKeys(job).banned(), LIAR) == b"checksum"


def test_a_strike_that_is_nobodys_fault_does_not_count(
    redis: Redis, database: Database, history: History, create: Callable[..., str]
) -> None:
    job = create()
    feed = Feed(redis, job, PLAN)
    feed.open()
    feed.join()
    feed.submit(0, nonce="n0")
    about = {"worker": LIAR, "nonce": "n0", "base": "", "micro_batch": 0, "reason": "not finite"}
    feed.send("refused", **about, strike=False)
    Projector(database).step(redis)
    assert (history.worker(job, LIAR).refused, history.worker(job, LIAR).strikes) == (1, 0)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("owner", "name"), [(RoundStore, "lift_ban"), (Courier, "_note")])
def test_death_while_a_ban_is_lifted_leaves_it_lifted(
    owner: type,
    name: str,
    after: bool,
    redis: Redis,
    dispatcher: Dispatcher,
    database: Database,
    bans: Bans,
    job: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bans.lift(job, LIAR)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, dying(getattr(owner, name), after))
        with pytest.raises(Killed):
            dispatcher.step(redis)
    Dispatcher(database, dispatcher._artifacts_dir).step(redis)
    assert redis.hlen(JobKeys(job).banned()) == 0
    assert [seat for seat in queued(redis, LIAR) if job in seat] == [f"{LIAR}-{job}-1-1"]


def test_unban_over_rest(client: TestClient, redis: Redis) -> None:
    services = client.app.state.services  # type: ignore[attr-defined]
    services.control.stop()  # the events of this test are taken when it says so
    job = client.post("/v1/jobs", json={"dataset": "digits", "model": "mlp", "queue": "nobody"}).json()["id"]
    feed = Feed(redis, job, PLAN)
    feed.open()
    feed.join(LIAR, "liar")
    path = f"/v1/jobs/{job}/workers/{LIAR}/unban"
    Projector(services.database).step(redis)
    assert client.post(path).status_code == 409
    ban(feed)
    Projector(services.database).step(redis)
    (shown,) = client.get(f"/v1/jobs/{job}/workers").json()["items"]
    assert (shown["banned"], shown["strikes"]) == ("checksum", 5)
    page = client.get(f"/jobs/{job}", headers={"Accept": "text/html"}).text
    assert f'data-unban="{LIAR}"' in page
    answer = client.post(path)
    assert (answer.status_code, answer.json()["id"], answer.json()["banned"]) == (202, LIAR, None)
    assert client.post(path).status_code == 409
    assert client.post(f"/v1/jobs/{job}/workers/nobody/unban").status_code == 404
    assert client.post(f"/v1/jobs/nojob/workers/{LIAR}/unban").status_code == 404
    assert f'data-unban="{LIAR}"' not in client.get(f"/jobs/{job}", headers={"Accept": "text/html"}).text


def test_a_machine_serves_its_invites_queue_and_none_once_that_was_withdrawn(database: Database) -> None:
    invites = InviteService(database, public_url="https://home.example")
    made, code = invites.create("mnist", 15)
    invites.take_up(code, Introduction(**introduction("anna", code, SigningKey.new())), from_here=False)
    ids, said = (f"{made.id}work", "bbbbbbbbwork1"), ("mnist", "other")
    workers = [WorkerInfo(one, "anna", "cpu", said, {}, 1, "mac", 1) for one in ids]

    def served() -> list[tuple[str, ...]]:
        with database.engine.connect() as connection:
            return [worker.queues for worker in confined(connection, workers)]

    assert served() == [("mnist",), said]
    invites.withdraw(made.id)
    assert served() == [(), said]


@pytest.mark.parametrize("withdrawn", [False, True])
def test_a_machine_that_calls_itself_as_another_does_not_hand_its_ban_over(
    database: Database, create: Callable[..., str], withdrawn: bool
) -> None:
    """Host and name are what machines say of themselves; what the gateway holds them to is the invite's id."""
    invites, job, now = InviteService(database, public_url="https://home.example"), create(), now_ms()
    made, code = invites.create("mnist", 15)
    invites.take_up(code, Introduction(**introduction("anna", code, SigningKey.new())), from_here=False)
    roll, liar = Roll(database), f"{made.id}evil"

    def heard(at_ms: int, *workers: str) -> None:
        said = [WorkerInfo(one, "anna", "cpu", ("mnist",), {}, 1, "mac", 1, last_seen_ms=at_ms) for one in workers]
        roll.call(said, at_ms, calm=False)

    heard(now, "bbbbbbbbwork1", liar)
    row = {"job_id": job, "worker": liar, "name": "anna", "device": "cpu", "seen_ms": now, "banned": "bad"}
    with database.writing() as connection:
        connection.execute(WORKER.insert().values(row))
    heard(now + 5000, liar)
    if withdrawn:
        invites.withdraw(made.id)
    heard(now + 9000)
    heard(now + 20_000, "ccccccccwork2")
    with database.engine.connect() as connection:
        banned = connection.scalars(select(WORKER.c.worker).where(WORKER.c.banned.is_not(None))).all()
    assert banned == [liar]
