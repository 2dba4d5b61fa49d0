"""Workers that are drained, removed and seen again; queues; priorities and fair shares, against a real broker."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from sqlalchemy import func, select, update
from sqlmodel import col
from starlette.testclient import TestClient

from api.broker import Broker
from api.database import Database
from api.errors import Conflict, NotFound
from api.fleet.service import Fleet
from api.jobs.history import History
from api.jobs.service import Jobs
from api.scheduler import seat_planner
from api.scheduler.dispatcher import Dispatcher
from api.scheduler.fair_share import SeatDemand, shares
from api.scheduler.machines import HOUR_MS, KEPT_MS, MACHINE, NOTED_MS, TALLY_MS, last_hour
from api.scheduler.seat_planner import REBALANCE_MS, TAKE_OVER_MS, Leave
from api.scheduler.seat_writer import place
from api.tables import JOB, WorkerStat
from computeshare.protocol import keys
from computeshare.protocol.handshake import PROTOCOL
from computeshare.protocol.keys import JobKeys
from computeshare.queue import Orders, WorkerInfo, read_orders, register, unregister
from computeshare.settings import Settings
from tests.support.scheduling_clock import Clock, online, seats, set_rq_status

Create = Callable[..., str]


@pytest.fixture
def fleet(database: Database, settings: Settings) -> Fleet:
    return Fleet(database, Broker(settings))


class Stage:
    """Turns of the dispatcher, a second apart; workers that begin and leave the seats they are given."""

    def __init__(self, redis: Redis, dispatcher: Dispatcher, database: Database, clock: Clock, queue: str) -> None:
        self.redis, self.dispatcher, self.database, self.clock, self.queue = redis, dispatcher, database, clock, queue
        self.workers: list[str] = []

    def worker(self) -> str:
        self.workers.append(online(self.redis, self.queue))
        return self.workers[-1]

    def turn(self, seconds: int = 1) -> None:
        """Each second: whoever was given a seat serves it, whoever was asked to leave one does."""
        for _ in range(seconds):
            self.dispatcher.step(self.redis)
            for seat in seats(self.database, "issued"):
                leaves = read_orders(self.redis, seat.worker).leave == seat.id
                set_rq_status(self.redis, seat.id, "finished" if leaves else "started")
                online(self.redis, self.queue, None if leaves else seat.id, seat.worker)
            busy = {seat.worker for seat in seats(self.database, "issued")}
            for worker in set(self.workers) - busy:
                online(self.redis, self.queue, worker=worker)
            self.clock.ms += 1000

    def serving(self) -> dict[str, list[str]]:
        """Job to its workers."""
        found: dict[str, list[str]] = {}
        for seat in seats(self.database, "pending", "issued"):
            found.setdefault(seat.job_id, []).append(seat.worker)
        return found

    def begin(self, job: str) -> str:
        """As if a worker had joined the job."""
        with self.database.writing() as connection:
            connection.execute(update(JOB).where(JOB.c.id == job).values(started_ms=self.clock.ms, status="running"))
        return job


@pytest.fixture
def stage(redis: Redis, dispatcher: Dispatcher, database: Database, clock: Clock, queue: str) -> Stage:
    return Stage(redis, dispatcher, database, clock, queue)


def test_a_drained_worker_leaves_its_seat_politely_and_comes_back_when_undrained(
    stage: Stage, fleet: Fleet, jobs: Jobs, history: History, create: Create, redis: Redis
) -> None:
    worker, job = stage.worker(), create()
    stage.turn(2)
    assert stage.serving() == {job: [worker]}
    assert fleet.drain(worker, drained=True).drained
    stage.dispatcher.step(redis)
    (seat,) = seats(stage.database)
    assert read_orders(redis, worker) == Orders(leave=seat.id)
    assert stage.serving() == {job: [worker]}  # it finishes its work unit
    stage.turn(10)
    assert stage.serving() == {}
    assert [s.state for s in seats(stage.database)] == ["left"]
    assert jobs.show(job).reason == f"Needs 1 worker on queue {stage.queue}, 1 is online; 1 is drained"
    assert [e.data for e in history.timeline(job) if e.type == "recalled"] == [
        {"worker": worker, "why": "drained", "to": None}
    ]
    assert not fleet.drain(worker, drained=False).drained
    stage.turn(2)
    assert stage.serving() == {job: [worker]}


def test_draining_twice_is_draining_once_and_a_seat_that_has_not_begun_is_taken_back(
    stage: Stage, fleet: Fleet, create: Create, redis: Redis
) -> None:
    worker, job = stage.worker(), create()
    stage.dispatcher.step(redis)
    assert stage.serving() == {job: [worker]}
    for _ in range(2):
        assert fleet.drain(worker, drained=True).drained
    stage.dispatcher.step(redis)
    assert [s.state for s in seats(stage.database)] == ["stopped"]
    assert not redis.exists(keys.orders(worker))


def test_draining_outlives_the_control_plane_and_a_broker_that_lost_everything(
    stage: Stage, fleet: Fleet, create: Create, redis: Redis, tmp_path: Path
) -> None:
    worker = stage.worker()
    job = create()
    stage.turn(2)
    fleet.drain(worker, drained=True)
    stage.dispatcher.step(redis)
    redis.delete(keys.orders(worker))
    stage.dispatcher = Dispatcher(stage.database, tmp_path / "artifacts")
    stage.dispatcher.step(redis)
    assert read_orders(redis, worker).leave == seats(stage.database)[0].id
    redis.delete(JobKeys(job).spec(), keys.worker(worker))
    stage.turn(30)
    assert stage.serving() == {}


def machine(name: str, host: str = "studio", queue: str = "nobody") -> WorkerInfo:
    return WorkerInfo(secrets.token_hex(6), name, "cpu", (queue,), {}, 8 * 10**9, host, 1)


def restart(stage: Stage, redis: Redis, before: WorkerInfo) -> WorkerInfo:
    """The same worker as a new process."""
    unregister(redis, before.id)
    stage.turn()
    after = replace(before, id=secrets.token_hex(6))
    register(redis, after)
    stage.turn()
    return after


def named(fleet: Fleet, name: str) -> list[Any]:
    return [worker for worker in fleet.workers(offline=True).items if worker.name == name]


def test_a_machine_that_was_restarted_ten_times_is_one_line_and_stays_drained(
    stage: Stage, fleet: Fleet, redis: Redis
) -> None:
    worker = machine(name := secrets.token_hex(8))
    register(redis, worker)
    stage.turn()
    (first,) = named(fleet, name)
    fleet.drain(worker.id, drained=True)
    for _ in range(10):
        worker = restart(stage, redis, worker)
    (line,) = named(fleet, name)
    assert (line.id, line.online, line.drained) == (worker.id, True, True)
    assert line.first_seen == first.first_seen
    unregister(redis, worker.id)
    stage.turn()
    (line,) = named(fleet, name)
    assert (line.id, line.online, line.drained, line.pid) == (worker.id, False, True, None)
    with stage.database.engine.connect() as connection:
        assert len(connection.execute(select(MACHINE).where(MACHINE.c.name == name)).all()) == 1


def test_a_machine_is_the_owners_until_it_is_assigned_and_keeps_its_person_over_restarts(
    stage: Stage, fleet: Fleet, redis: Redis, create: Create
) -> None:
    worker = machine(name := secrets.token_hex(8))
    register(redis, worker)
    stage.turn()
    assert [one.person for one in named(fleet, name)] == ["owner"]
    others, jobs = secrets.token_hex(6), [create() for _ in range(2)]
    with stage.database.write() as session:
        for job, of, called in (
            (jobs[0], "an earlier process", name),
            (jobs[1], worker.id, name),
            (jobs[1], others, others),
        ):
            session.add(WorkerStat(job_id=job, worker=of, name=called, samples=10))
    assert fleet.assign(worker.id, "Anna").person == "Anna"
    worker = restart(stage, redis, worker)
    assert [one.person for one in named(fleet, name)] == ["Anna"]
    with stage.database.write() as session:
        people = {row.worker: row.person for row in session.scalars(select(WorkerStat))}
    assert people["an earlier process"] == "Anna" and people[others] is None
    assert fleet.assign(worker.id, None).person == "owner"
    assert fleet.assign(worker.id, "owner").person == "owner"  # saved as it stood
    with stage.database.engine.connect() as connection:
        of_machine = select(MACHINE.c.person).where(MACHINE.c.worker == worker.id)
        assert connection.scalar(of_machine) is None, "the owner's name may change"
    with pytest.raises(NotFound):
        fleet.assign("nobody", "Anna")


def test_a_further_worker_of_an_assigned_machine_is_its_persons_too(stage: Stage, fleet: Fleet, redis: Redis) -> None:
    first, second = machine(name := secrets.token_hex(8)), machine(name)
    register(redis, first)
    stage.turn()
    fleet.assign(first.id, "Anna")
    for worker in (second, machine(name, host="another")):
        register(redis, worker)
    stage.turn()
    found = {worker.id: worker.person for worker in named(fleet, name)}
    assert [found.pop(first.id), found.pop(second.id), *found.values()] == ["Anna", "Anna", "owner"]


def test_a_worker_without_a_name_is_assigned_alone(stage: Stage, fleet: Fleet, redis: Redis) -> None:
    one, other = machine("", host=secrets.token_hex(8)), machine("", host=secrets.token_hex(8))
    for worker in (one, other):
        register(redis, worker)
    stage.turn()
    fleet.assign(one.id, "Anna")
    found = {worker.id: worker.person for worker in fleet.workers().items}
    assert (found[one.id], found[other.id]) == ("Anna", "owner")


def test_a_worker_restarted_before_its_registration_ran_out_is_the_same_machine(
    stage: Stage, fleet: Fleet, redis: Redis
) -> None:
    killed = machine(name := secrets.token_hex(8))
    register(redis, killed)
    stage.turn()
    fleet.drain(killed.id, drained=True)
    later = replace(killed, id=secrets.token_hex(6))
    register(redis, later)
    stage.turn()
    assert [worker.drained for worker in named(fleet, name) if worker.id == later.id] == [False]
    unregister(redis, killed.id)  # it ran out
    stage.turn()
    (line,) = named(fleet, name)
    assert (line.id, line.drained) == (later.id, True)


def test_of_two_workers_of_one_name_beside_each_other_only_the_drained_one_rests(
    stage: Stage, fleet: Fleet, redis: Redis
) -> None:
    name = secrets.token_hex(8)
    one, other = machine(name), machine(name)
    for worker in (one, other):
        register(redis, worker)
    stage.turn()
    fleet.drain(one.id, drained=True)
    for worker in (one, other):
        register(redis, worker)
    stage.turn()
    assert {worker.id: worker.drained for worker in named(fleet, name)} == {one.id: True, other.id: False}
    unregister(redis, one.id)
    stage.turn()
    assert [(worker.id, worker.drained) for worker in named(fleet, name)] == [(other.id, False)]
    undrained = fleet.drain(one.id, drained=False)  # though the other's line is all that is shown of both
    assert (undrained.id, undrained.online, undrained.drained) == (one.id, False, False)


def test_a_worker_that_is_removed_is_asked_to_end_and_then_forgotten(
    stage: Stage, fleet: Fleet, create: Create, redis: Redis
) -> None:
    worker = stage.worker()
    job = create()
    stage.turn(2)
    for _ in range(2):
        fleet.remove(worker)
    stage.dispatcher.step(redis)
    assert "removed" in str(read_orders(redis, worker).dismissed)
    assert [one.leaving for one in named(fleet, f"mac-{worker}")] == [True]
    with pytest.raises(Conflict, match="restart it once it has stopped"):
        fleet.drain(worker, drained=True)
    stage.workers.clear()
    seat = stage.serving()[job][0] and seats(stage.database)[0].id
    set_rq_status(redis, seat, "finished")
    unregister(redis, worker)
    stage.dispatcher.step(redis)
    assert named(fleet, f"mac-{worker}") == []
    with pytest.raises(NotFound, match=worker):
        fleet.remove(worker)


def test_a_worker_that_was_removed_while_it_was_cut_off_is_asked_to_end_when_it_is_back(
    stage: Stage, fleet: Fleet, create: Create, redis: Redis
) -> None:
    worker = stage.worker()
    stage.turn()
    fleet.remove(worker)
    stage.workers.clear()
    unregister(redis, worker)  # before it has read its orders
    stage.turn(2 * NOTED_MS // 1000)
    redis.delete(keys.orders(worker))
    job = create()
    online(redis, stage.queue, worker=worker)
    stage.turn()
    assert "removed" in str(read_orders(redis, worker).dismissed)
    assert stage.serving().get(job) is None
    unregister(redis, worker)


HOSTILE = [
    ("memory_bytes", str(2**80)),
    ("memory_bytes", "9" * 900),
    ("pid", str(-(2**80))),
    ("protocol", str(2**80)),
    ("queues", r'["\ud800", "\u001b[2J"]'),
    ("queues", "[" * 990),
    ("queues", f"[{'[' * 490}{']' * 490}]"),
    ("versions", r'{"torch\ud800": "\ud800"}'),
    ("power", "[" * 990),
    ("name", "\x1b[2J\u202e"),
    ("host", "\x00"),
]


@pytest.mark.parametrize(("field", "said"), HOSTILE, ids=lambda text: text[:20])
@pytest.mark.slow
def test_whatever_a_worker_says_of_itself_others_get_their_seats_and_are_listed(
    field: str, said: str, stage: Stage, fleet: Fleet, create: Create, redis: Redis
) -> None:
    hostile, worker, job = online(redis, stage.queue), stage.worker(), create(workers={"min": 1, "max": 2})
    redis.hset(keys.worker(hostile), field, said)
    stage.turn(2)
    assert worker in stage.serving()[job]
    listed = fleet.workers(offline=True).model_dump_json()
    assert worker in listed and not any(evil in listed for evil in ("\\u001b", "\\u0000", "\u202e"))
    unregister(redis, hostile)


def test_a_worker_that_is_offline_is_forgotten_by_hand_or_after_thirty_days(
    stage: Stage, fleet: Fleet, redis: Redis
) -> None:
    one, other = machine(first := secrets.token_hex(8)), machine(second := secrets.token_hex(8))
    for worker in (one, other):
        register(redis, worker)
    stage.turn()
    for worker in (one, other):
        unregister(redis, worker.id)
    stage.turn()
    assert [worker.online for worker in named(fleet, first) + named(fleet, second)] == [False, False]
    fleet.remove(one.id)
    assert named(fleet, first) == [] and len(named(fleet, second)) == 1
    with pytest.raises(NotFound):
        fleet.remove(one.id)
    stage.clock.ms += KEPT_MS + 1
    stage.turn(2 * NOTED_MS // 1000)
    assert named(fleet, second) == []


def test_jobs_of_one_priority_come_to_share_the_workers_and_then_leave_them_alone(
    stage: Stage, create: Create, database: Database
) -> None:
    for _ in range(4):
        stage.worker()
    first = stage.begin(create(micro_batches_per_round=8))
    stage.turn(3)
    assert len(stage.serving()[first]) == 4
    second = create(micro_batches_per_round=8)
    stage.turn(REBALANCE_MS // 1000)
    assert len(stage.serving()[first]) == 4
    stage.turn(4)
    assert {job: len(workers) for job, workers in stage.serving().items()} == {first: 3, second: 1}
    stage.begin(second)
    stage.turn(14)
    assert {job: len(workers) for job, workers in stage.serving().items()} == {first: 2, second: 2}
    given = len(seats(database))
    stage.turn(60)
    assert len(seats(database)) == given


def test_a_higher_priority_takes_workers_over_and_gives_them_back(
    stage: Stage, create: Create, jobs: Jobs, history: History, redis: Redis
) -> None:
    for _ in range(2):
        stage.worker()
    low = stage.begin(create())
    stage.turn(3)
    high = create(priority=10)
    for job in (low, high):
        redis.set(JobKeys(job).reducer(), "1|host|1|id")
    stage.turn(1)
    assert jobs.show(high).reason == f"Waiting for 1 worker on queue {stage.queue}, which other jobs will release"
    stage.turn(2 * TAKE_OVER_MS // 1000 + 4)
    assert {job: len(workers) for job, workers in stage.serving().items()} == {high: 2}
    assert jobs.show(low).reason == f"Waiting: 2 workers on queue {stage.queue} serve jobs of higher priority"
    recalled = [event.data for event in history.timeline(low) if event.type == "recalled"]
    assert [(data["why"], data["to"]) for data in recalled] == [("priority", high)] * 2
    jobs.update(high, priority=-1)
    jobs.update(high, priority=-1)
    stage.turn(2 * TAKE_OVER_MS // 1000 + 6)
    assert {job: len(workers) for job, workers in stage.serving().items()} == {low: 2}
    changed = [event.data for event in history.timeline(high) if event.type == "edited"]
    assert [(data["before"], data["after"]) for data in changed] == [(10, -1)]


def test_the_shares_are_worked_out_once_a_turn(stage: Stage, create: Create, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[int] = []

    def counted(wants: Sequence[SeatDemand]) -> dict[str, int]:
        turns.append(stage.clock.ms)
        return shares(wants)

    stage.worker()
    create()
    monkeypatch.setattr(seat_planner, "shares", counted)
    stage.turn(3)
    assert len(turns) == len(set(turns)) == 3


def test_being_asked_to_leave_is_news_of_the_job(
    stage: Stage, create: Create, jobs: Jobs, database: Database, clock: Clock
) -> None:
    stage.worker()
    job = create()
    stage.turn(2)
    before = jobs.revision(job)
    with database.writing() as connection:
        place(connection, Leave(seats(database)[0].id, None, "drained"), clock.ms)
    assert jobs.revision(job) == before + 1


def test_after_a_restart_of_the_control_plane_no_worker_changes_over_at_once(
    stage: Stage, create: Create, tmp_path: Path
) -> None:
    for _ in range(2):
        stage.worker()
    first = stage.begin(create())
    stage.turn(3)
    second = create()
    stage.turn(REBALANCE_MS // 1000 - 3)
    stage.dispatcher = Dispatcher(stage.database, tmp_path / "artifacts")
    stage.turn(REBALANCE_MS // 1000 - 1)
    assert len(stage.serving()[first]) == 2
    stage.turn(5)
    assert {job: len(workers) for job, workers in stage.serving().items()} == {first: 1, second: 1}


def test_queues_tell_their_jobs_in_the_order_served(
    stage: Stage, fleet: Fleet, create: Create, jobs: Jobs, queue: str
) -> None:
    stage.worker()
    low, high = create(priority=-5, name="low"), create(priority=5, workers={"min": 1, "max": 3}, name="high")
    paused = create()
    jobs.pause(paused)
    stage.turn(2)
    (found,) = [one for one in fleet.queues().items if one.name == queue]
    assert (found.workers, found.queued, found.running) == (1, 2, 0)
    assert [(one.id, one.title, one.priority, one.wanted, one.held) for one in found.jobs] == [
        (high, "high", 5, 3, 1),
        (low, "low", -5, 4, 0),
    ]


def test_a_queue_whose_name_is_none_is_not_told(fleet: Fleet, redis: Redis, queue: str) -> None:
    hostile = machine("hostile", queue=f"{queue}; rm -rf ~")
    register(redis, hostile)
    assert [one.name for one in fleet.queues().items if queue in one.name] == []
    unregister(redis, hostile.id)


def test_shares_are_of_the_last_hour_and_of_the_job(
    stage: Stage, fleet: Fleet, create: Create, database: Database, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.fleet.service.now_ms", clock)
    one, other = stage.worker(), stage.worker()
    job = create()
    stage.turn(2)

    def count(worker: str, samples: int) -> None:
        with database.write() as session:
            row = session.get(WorkerStat, (job, worker)) or WorkerStat(job_id=job, worker=worker)
            row.samples = samples
            session.add(row)

    count(one, 300)
    count(other, 100)
    found = {worker.id: worker for worker in fleet.workers().items}
    assert (found[one].share, found[one].job_share) == (0.75, 0.75)
    for _ in range((HOUR_MS + 2 * TALLY_MS) // TALLY_MS + 1):
        clock.ms += TALLY_MS
        stage.turn()
    count(other, 200)
    found = {worker.id: worker for worker in fleet.workers().items}
    assert (found[one].share, found[other].share, found[one].job_share) == (0.0, 1.0, 0.6)


def test_a_worker_is_as_fast_as_it_is_in_jobs_that_run(
    stage: Stage, fleet: Fleet, create: Create, database: Database, jobs: Jobs
) -> None:
    worker = stage.worker()
    runs, paused = stage.begin(create()), create()
    jobs.pause(paused)
    with database.write() as session:
        session.add_all([WorkerStat(job_id=job, worker=worker, samples_per_s=5.0) for job in (runs, paused)])
    assert [one.samples_per_s for one in named(fleet, f"mac-{worker}")] == [5.0]


def test_counting_every_workers_samples_reads_an_index_alone(database: Database) -> None:
    with database.engine.connect() as connection:
        query = select(col(WorkerStat.worker), func.sum(col(WorkerStat.samples))).group_by(col(WorkerStat.worker))
        (plan,) = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {query}").all()
    assert "USING COVERING INDEX ix_worker_stat_samples" in plan[-1]


def test_what_a_deleted_job_had_counted_makes_no_share_negative() -> None:
    assert last_hour([[0, 500]], 100, 10) == 0
    assert last_hour([], 100, 10) == 100
    assert last_hour([[0, 0], [10, 40], [HOUR_MS, 90]], 100, HOUR_MS + 10) == 60


def test_the_routes_answer_for_workers_queues_and_priorities(client: TestClient, redis: Redis, queue: str) -> None:
    worker = machine("over-rest", queue=queue)
    register(redis, worker)
    path = f"/v1/workers/{worker.id}"
    drained = client.post(f"{path}/drain")
    assert (drained.status_code, drained.json()["drained"], drained.json()["online"]) == (202, True, True)
    assert client.post(f"{path}/undrain").json()["drained"] is False
    job = client.post("/v1/jobs", json={"dataset": "digits", "model": "mlp", "queue": queue, "priority": 3}).json()
    assert (job["priority"], job["spec"]["priority"]) == (3, 3)
    changed = client.patch(f"/v1/jobs/{job['id']}", json={"priority": -100})
    assert (changed.status_code, changed.json()["priority"], changed.json()["spec"]["priority"]) == (200, -100, -100)
    for wrong in ({"priority": 101}, {"priority": "1"}, {}, {"priority": 1, "queue": "x"}):
        assert client.patch(f"/v1/jobs/{job['id']}", json=wrong).status_code == 422, wrong
    client.post(f"/v1/jobs/{job['id']}/cancel")
    late = client.patch(f"/v1/jobs/{job['id']}", json={"priority": 1})
    assert (late.status_code, "has not ended" in late.json()["detail"]) == (409, True)
    assert client.delete(path).status_code == 204
    assert client.post(f"{path}/drain").status_code == 409
    unregister(redis, worker.id)
    missing = client.post("/v1/workers/nobody00/drain")
    assert (missing.status_code, "nobody00" in missing.json()["detail"]) == (404, True)
    assert client.delete("/v1/workers/nobody00").status_code == 404


def test_a_job_of_an_earlier_release_has_priority_zero(create: Create, jobs: Jobs, database: Database) -> None:
    job = create()
    with database.writing() as connection:
        spec = {name: value for name, value in jobs.show(job).spec.items() if name != "priority"}
        connection.execute(update(JOB).where(JOB.c.id == job).values(spec=spec))
    assert jobs.show(job).priority == 0
    assert jobs.update(job, priority=0).priority == 0


def test_orders_that_make_no_sense_are_none(redis: Redis) -> None:
    worker = secrets.token_hex(6)
    for raw in (b"\xff", b"[]", b"7", b'{"leave": 7}', b"{"):
        redis.set(keys.orders(worker), raw, ex=10)
        assert read_orders(redis, worker).dismissed is None
    assert PROTOCOL >= 4  # older workers would not obey
