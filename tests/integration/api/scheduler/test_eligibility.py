"""Workers that get no seat: those that cannot start in a job, and those of another version."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from redis import Redis
from sqlalchemy import insert
from starlette.testclient import TestClient

from api.broker import Broker
from api.database import Database
from api.fleet.service import Fleet
from api.jobs.history import History
from api.jobs.service import Jobs
from api.projection.projector import Projector
from api.scheduler.dispatcher import Dispatcher
from api.scheduler.machines import INVITE
from api.scheduler.start_backoff import FAILURES, NAMED
from computeshare.errors import VersionError
from computeshare.evaluator.evaluator import Evaluator
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol import handshake, keys
from computeshare.protocol.handshake import PROTOCOL
from computeshare.protocol.keys import JobKeys
from computeshare.queue import WorkerInfo, list_workers, register
from computeshare.reducer.process import Reducer
from computeshare.runtime.processes import stop_event
from computeshare.settings import Settings
from computeshare.terminal.command import OTHER_VERSION, USAGE
from computeshare.worker.heartbeat import Heartbeat
from computeshare.worker.process import shake_hands
from tests.support.event_stream import SECONDS, Feed, token
from tests.support.scheduling_clock import Clock, online, seats, set_rq_status
from tests.support.wait import wait_until

PLAN = JobSpec(dataset="digits", model="mlp").plan
SORRY = "failed: DatasetError: data set mnist is not in /data"


class Stage:
    """Turns of the dispatcher, seconds apart, in which every seat of one worker fails before it joins."""

    def __init__(self, redis: Redis, dispatcher: Dispatcher, database: Database, clock: Clock, queue: str) -> None:
        self.redis, self.dispatcher, self.database, self.clock, self.queue = redis, dispatcher, database, clock, queue

    def turn(self, *workers: str, seconds: int = 1) -> None:
        for worker in workers:
            online(self.redis, self.queue, worker=worker)
        self.dispatcher.step(self.redis)
        self.clock.ms += 1000 * seconds

    def fail(self, worker: str, feed: Feed, reason: str = SORRY) -> int:
        """The worker's seats that wait fail, and say why; returns how many did."""
        mine = [seat for seat in seats(self.database, "issued") if seat.worker == worker]
        for seat in mine:
            set_rq_status(self.redis, seat.id, "failed")
            feed.send("left", worker=worker, session=seat.id, reason=reason, freed=[])
        Projector(self.database).step(self.redis)
        return len(mine)


@pytest.fixture
def attended(create: Callable[..., str], redis: Redis) -> Callable[[], str]:
    """Makes a job that a reducer looks after."""

    def make() -> str:
        job = create()
        redis.set(JobKeys(job).reducer(), "1|host|1|id")
        return job

    return make


@pytest.fixture
def stage(redis: Redis, dispatcher: Dispatcher, database: Database, clock: Clock, queue: str) -> Stage:
    return Stage(redis, dispatcher, database, clock, queue)


@pytest.fixture
def fleet(database: Database, settings: Settings) -> Fleet:
    return Fleet(database, Broker(settings))


def fail_for(stage: Stage, worker: str, feed: Feed, seconds: int, step: int = 1) -> list[int]:
    """Let time pass; returns the seconds in which a seat failed."""
    failed = []
    for second in range(0, seconds, step):
        stage.turn(worker, seconds=step)
        if stage.fail(worker, feed):
            failed.append(second)
    return failed


@pytest.mark.slow
def test_a_worker_that_cannot_start_is_left_out_for_a_growing_while_and_the_reason_says_why(
    stage: Stage, redis: Redis, queue: str, attended: Callable[[], str], jobs: Jobs
) -> None:
    job, broken = attended(), online(redis, queue)
    feed = Feed(redis, job, PLAN)
    failed = fail_for(stage, broken, feed, 100)
    failed += [100 + second for second in fail_for(stage, broken, feed, 1400, step=4)]
    pauses = [later - earlier for earlier, later in pairwise(failed)]
    assert FAILURES == 5 and pauses[:4] == sorted(pauses[:4]) and pauses[3] < 12
    assert [pause // 10 for pause in pauses[4:10]] == [1, 3, 6, 12, 30, 60]
    assert jobs.show(job).reason == (
        f"Needs 1 worker on queue {queue}, 1 is online; mac-{broken} cannot start: data set mnist is not in /data"
    )


def test_a_worker_that_failed_twice_is_named_while_it_is_tried_again(
    stage: Stage, redis: Redis, queue: str, attended: Callable[[], str], jobs: Jobs
) -> None:
    job, broken = attended(), online(redis, queue)
    feed, failed, named = Feed(redis, job, PLAN), 0, []
    while failed < FAILURES - 1:
        stage.turn(broken)
        failed += stage.fail(broken, feed)
        named.append(
            (failed, f"mac-{broken} cannot start: data set mnist is not in /data" in str(jobs.show(job).reason))
        )
    assert not any(says for times, says in named if times < NAMED)
    assert any(says for times, says in named if times == NAMED)
    assert all(says for times, says in named if times > NAMED)
    assert "other jobs will release" not in str(jobs.show(job).reason)


def test_others_go_on_without_the_worker_that_cannot_start(
    stage: Stage, redis: Redis, queue: str, attended: Callable[[], str], jobs: Jobs, database: Database
) -> None:
    job, broken = attended(), online(redis, queue)
    feed = Feed(redis, job, PLAN)
    fail_for(stage, broken, feed, 40)
    stage.turn("cafecafecafe", broken)
    assert [s.worker for s in seats(database, "issued")] == ["cafecafecafe"]
    assert jobs.show(job).reason == f"mac-{broken} cannot start: data set mnist is not in /data"


@pytest.mark.slow
def test_a_worker_that_has_joined_is_not_one_that_cannot_start(
    stage: Stage, redis: Redis, queue: str, attended: Callable[[], str], database: Database, jobs: Jobs
) -> None:
    job, worker = attended(), online(redis, queue)
    feed = Feed(redis, job, PLAN)
    for _ in range(300):
        stage.turn(worker)
        for seat in seats(database, "issued"):
            about = {"session": seat.id, "seat": seat.id, "name": "mac", "device": "cpu"}
            feed.send("joined", worker=worker, **about)
            Projector(database).step(redis)
            stage.fail(worker, feed, "failed: killed")
    assert len(seats(database)) > 10  # it would have been left out for 10 minutes by now
    assert "cannot start" not in str(jobs.show(job).reason)


def test_a_worker_that_starts_at_last_begins_with_a_clean_slate(
    stage: Stage, redis: Redis, queue: str, attended: Callable[[], str], database: Database, jobs: Jobs
) -> None:
    job, worker = attended(), online(redis, queue)
    feed = Feed(redis, job, PLAN)
    fail_for(stage, worker, feed, 60)
    issued = wait_until(lambda: stage.turn(worker) or seats(database, "issued"))
    feed.send("joined", worker=worker, session="s", seat=issued[0].id, name="mac", device="cpu")
    Projector(database).step(redis)
    set_rq_status(redis, issued[0].id, "finished")
    stage.turn(worker)
    assert "cannot start" not in str(jobs.show(job).reason)


def test_a_machine_that_joined_by_an_invite_holds_no_stages_and_the_reason_says_what_to_do(
    stage: Stage, redis: Redis, queue: str, create: Callable[..., str], jobs: Jobs, database: Database
) -> None:
    row = {"digest": "d", "created_ms": 1, "expires_ms": 1, "used_ms": 1, "worker": "mac", "gateway": True}
    with database.writing() as connection:
        connection.execute(insert(INVITE), row | {"id": "1a2b3c4d", "queue": queue})
    job, whole = create(strategy={"kind": "pipeline", "stages": 2}, accumulate=4), create()
    for one in (job, whole):
        redis.set(JobKeys(one).reducer(), "1|host|1|id")
    stage.turn("1a2b3c4dwork")
    assert [seat.job_id for seat in seats(database, "issued")] == [whole]
    told = str(jobs.show(job).reason)
    assert "mac-1a2b3c4dwork cannot take part: machines that joined by an invite hold no stages of a model. " in told
    assert "Start the machine's worker with the broker's address (--redis-url), or choose another strategy" in told
    stage.turn("1a2b3c4dwork", "cafecafecafe")
    assert ("cafecafecafe", job) in [(seat.worker, seat.job_id) for seat in seats(database, "issued")]


def test_a_worker_whose_machine_is_unfit_is_left_out_at_once_and_for_good_until_it_is_started_again(
    stage: Stage, redis: Redis, queue: str, attended: Callable[[], str], jobs: Jobs, database: Database
) -> None:
    job, other, unfit = attended(), attended(), online(redis, queue)
    feed = Feed(redis, job, PLAN)
    stage.turn(unfit)
    (first,) = [seat for seat in seats(database, "issued") if seat.job_id == job]
    set_rq_status(redis, first.id, "finished")
    feed.send("unfit", worker=unfit, session="s", name="mac", device="mps (arm64)", reason="its mps computes wrongly")
    Projector(database).step(redis)
    for _ in range(40):
        stage.turn(unfit, seconds=60)
    assert {seat.job_id for seat in seats(database) if seat.id != first.id} == {other}
    assert jobs.show(job).reason == (
        f"Needs 1 worker on queue {queue}, 1 is online, 1 busy with other jobs; "
        f"mac-{unfit} cannot take part: its mps computes wrongly"
    )
    stage.turn(unfit, "cafecafecafe")
    assert ("cafecafecafe", job) in [(s.worker, s.job_id) for s in seats(database, "issued")]


def test_a_job_that_takes_more_than_a_worker_allows_gets_no_seat_there_before_anybody_has_measured_it(
    stage: Stage, redis: Redis, queue: str, attended: Callable[[], str], jobs: Jobs, fleet: Fleet, database: Database
) -> None:
    job, small = attended(), online(redis, queue, max_memory_bytes=400_000_000)
    stage.dispatcher.step(redis)
    why = f"mac-{small} cannot take part: the job needs about 502 MB, more than --max-memory allows (400 MB)"
    assert not seats(database) and why in str(jobs.show(job).reason)
    (found,) = [one for one in fleet.workers().items if one.id == small]
    assert found.max_memory_bytes == 400_000_000 and found.left_out[0].startswith(f"Job {job}: {why}")
    online(redis, queue, worker="cafecafecafe", max_memory_bytes=600_000_000)
    stage.dispatcher.step(redis)
    assert [seat.worker for seat in seats(database)] == ["cafecafecafe"]


def test_a_worker_of_another_queue_is_not_named_though_it_allows_too_little(
    stage: Stage, redis: Redis, queue: str, attended: Callable[[], str], jobs: Jobs, fleet: Fleet
) -> None:
    job, elsewhere = attended(), online(redis, f"{queue}-other", max_memory_bytes=400_000_000)
    stage.dispatcher.step(redis)
    assert elsewhere not in str(jobs.show(job).reason)
    (found,) = [one for one in fleet.workers().items if one.id == elsewhere]
    assert not any(job in text for text in found.left_out)


def test_what_was_measured_on_a_device_of_the_same_kind_decides(
    stage: Stage, redis: Redis, queue: str, create: Callable[..., str], jobs: Jobs, database: Database
) -> None:
    job = create(workers={"min": 1, "max": 3})
    redis.set(JobKeys(job).reducer(), "1|host|1|id")
    feed = Feed(redis, job, PLAN)
    feed.open()
    about = {"session": "s1", "seat": "a", "name": "mac", "kind": {}}
    feed.send("joined", worker="aaaaaaaaaaaa", device="cpu (arm64)", memory_bytes=5_000_000_000, **about)
    Projector(database).step(redis)
    online(redis, queue, worker="cafecafecafe", max_memory_bytes=2_000_000_000)
    stage.turn()
    assert [seat.worker for seat in seats(database)] == ["cafecafecafe"]  # the other's is an estimate until it sends
    feed.send("joined", worker="bbbbbbbbbbbb", device="mps (arm64)", memory_bytes=1, **about)
    for worker, taken in (("aaaaaaaaaaaa", 3_000_000_000), ("bbbbbbbbbbbb", 9_000_000_000)):
        current = token(0)
        sent = {"outcome": "accepted", "current": current, "base": current, "counted": [0], "micro_batches": [0]}
        sent |= {"session": "s1", "nonce": worker, "bytes_up": 1, "bytes_down": 1, "seconds": SECONDS}
        feed.send("submission", worker=worker, memory_bytes=taken, **sent)
    Projector(database).step(redis)
    online(redis, queue, worker="deafdeafdeaf", max_memory_bytes=2_500_000_000)
    online(redis, queue, worker="feedfeedfeed", max_memory_bytes=3_500_000_000)
    stage.turn()
    assert "deafdeafdeaf" not in {seat.worker for seat in seats(database)} and "feedfeedfeed" in {
        seat.worker for seat in seats(database)
    }
    memory = {one.id: one.memory_bytes for one in History(database, stage.dispatcher._artifacts_dir).workers(job).items}
    assert memory == {"aaaaaaaaaaaa": 3_000_000_000, "bbbbbbbbbbbb": 9_000_000_000}


def test_a_worker_that_dies_without_a_word_is_named_too(
    stage: Stage, redis: Redis, queue: str, attended: Callable[[], str], jobs: Jobs
) -> None:
    job, broken = attended(), online(redis, queue)
    fail_for(stage, broken, Feed(redis, job, PLAN), 40)
    assert jobs.show(job).reason is not None
    other = attended()
    for _ in range(40):
        stage.turn(broken)
        for seat in seats(stage.database, "issued"):
            set_rq_status(redis, seat.id, "failed")
    assert f"mac-{broken} cannot start: its process ended" in str(jobs.show(other).reason)


# Versions


def worker(protocol: int = PROTOCOL, version: str = handshake.OURS.version) -> WorkerInfo:
    versions = {"computeshare": version}
    return WorkerInfo("deadbeef0000", "old", "cpu", ("default",), versions, 1, "host", 1, protocol=protocol)


OTHERS = [
    {"protocol": PROTOCOL - 1},
    {"protocol": PROTOCOL + 1},
    {"protocol": 0},
    {"version": "0.0.9"},
    {"version": "x"},
]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_a_worker_of_another_version_gets_no_seat_and_loses_the_one_it_has(
    other: dict[str, object],
    redis: Redis,
    dispatcher: Dispatcher,
    database: Database,
    queue: str,
    create: Callable[..., str],
) -> None:
    name = online(redis, queue)
    create()
    dispatcher.step(redis)
    assert len(seats(database, "issued")) == 1
    register(redis, replace(worker(**other), id=name, queues=(queue,)))  # type: ignore[arg-type]
    dispatcher.step(redis)
    create()
    dispatcher.step(redis)
    assert [seat.state for seat in seats(database)] == ["lost"]


def test_a_patch_release_of_the_same_protocol_is_taken() -> None:
    major, minor = handshake.OURS.series
    assert worker(version=f"{major}.{minor}.99").refusal is None
    assert worker().refusal is None


def test_the_refusal_names_both_versions_and_what_to_type_where() -> None:
    older, newer = worker(protocol=PROTOCOL - 1).refusal, worker(protocol=PROTOCOL + 1).refusal
    assert older and newer and "git pull && make install" in older and f"protocol {PROTOCOL - 1}" in older
    assert "this worker's machine" in older and "the control plane's machine" in newer
    assert all(told.endswith("make install, then start this worker again") for told in (older, newer))


def test_a_worker_that_states_no_protocol_is_refused(own: Redis) -> None:
    register(own, worker())
    own.hdel(keys.worker("deadbeef0000"), "protocol")
    (found,) = list_workers(own)
    assert "protocol unknown" in str(found.refusal)


def test_the_control_plane_says_what_it_speaks(redis: Redis, dispatcher: Dispatcher) -> None:
    redis.delete(keys.RELEASE)
    assert handshake.published(redis) is None
    dispatcher.step(redis)
    assert handshake.published(redis) == handshake.OURS


def test_every_process_refuses_to_work_for_a_control_plane_of_another_version(own: Redis, tmp_path: object) -> None:
    own.set(keys.RELEASE, json.dumps({"version": "9.9.0", "protocol": PROTOCOL + 1}))
    with pytest.raises(VersionError, match=r"this worker runs .* upgrade this worker's machine") as refused:
        shake_hands(own, threading.Event())
    heartbeat = Heartbeat(own, own, worker())
    heartbeat.refusal = refused.value
    heartbeat.stop()
    (shown,) = list_workers(own)
    assert shown.state == "refused"
    stop = stop_event()
    with pytest.raises(VersionError, match="this reducer"):
        Reducer(own, tmp_path, tmp_path / "bundles", stop).run()  # type: ignore[arg-type]
    with pytest.raises(VersionError, match="this evaluator"):
        Evaluator(own, tmp_path, tmp_path, stop).run()  # type: ignore[arg-type]
    own.set(keys.RELEASE, b"\xff not JSON")
    handshake.check(own, "worker")


def test_the_workers_page_and_rest_say_who_is_refused_and_why(client: TestClient, redis: Redis) -> None:
    register(redis, replace(worker(protocol=PROTOCOL - 1), id="beefbeefbeef"))
    shown = {w["id"]: w for w in client.get("/v1/workers").json()["items"]}
    assert "git pull" in shown["beefbeefbeef"]["refused"]
    page = client.get("/workers", headers={"Accept": "text/html"}).text
    assert "Refused: this worker runs" in page
    redis.delete(keys.worker("beefbeefbeef"))


def test_a_worker_process_of_another_version_prints_the_line_and_exits_with_a_code_of_its_own(
    own: Redis, own_url: str
) -> None:
    own.set(keys.RELEASE, json.dumps({"version": "9.9.0", "protocol": PROTOCOL + 1}))
    command = [sys.executable, "-m", "computeshare.worker.process", "--device", "cpu"]
    environment = {**os.environ, "COMPUTESHARE_REDIS_URL": own_url}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, "git pull && make install" in ended.stderr) == (OTHER_VERSION, True)
    assert len(ended.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("device", ["xyz", "cuda:99", "mps0"])
@pytest.mark.slow
def test_a_device_that_is_not_there_is_told_at_the_workers_start(device: str, redis_url: str) -> None:
    command = [sys.executable, "-m", "computeshare.worker.process", "--redis-url", redis_url, "--device", device]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == USAGE
    assert f"device '{device}'" in ended.stderr
