"""Processes that die by SIGKILL at each failpoint, and what whoever comes after them makes of it."""

import json
import re
import secrets
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from sqlalchemy import select

from api.database import Database
from api.jobs.history import History
from api.jobs.service import Jobs
from api.projection.projector import Projector
from api.scheduler.dispatcher import Dispatcher
from api.tables import Submission, VersionRow, table
from computeshare.checkpoints.store import Artifacts
from computeshare.errors import FailpointError
from computeshare.jobspec.spec import JobSpec
from computeshare.queue import Seat
from computeshare.runtime import failpoints
from computeshare.runtime.failpoints import VARIABLE, Action, failpoint
from computeshare.settings import Settings
from computeshare.tensors import layout
from computeshare.transport.connections import connect
from computeshare.worker.seat.seat import SeatSession
from tests.support.drafts import Sending
from tests.support.event_stream import Feed
from tests.support.failpoints import apart
from tests.support.job_reducer import Hand, Job, spec_of
from tests.support.scheduling_clock import Clock, online, queued, seats

ROOT = Path(__file__).resolve().parents[3]
Points = Callable[[str], None]


def killed(act: Callable[[], object], name: str, passing: int = 1) -> None:
    """`act` in a process of its own, which must have died at this failpoint."""
    assert apart(act, f"{name}=kill@{passing}") == -signal.SIGKILL, f"{name} was not passed {passing} times"


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> Points:
    """Arms failpoints in this process."""

    def arm(text: str) -> None:
        monkeypatch.setenv(VARIABLE, text)
        failpoints._points.cache_clear()

    yield arm
    failpoints._points.cache_clear()


# What a failpoint does


def test_a_failpoint_nobody_armed_does_nothing(points: Points) -> None:
    points("another=error")
    failpoint("after_push")
    points("")
    failpoint("another")


def test_a_failpoint_acts_at_its_passing_and_no_other(points: Points) -> None:
    points("here=error@2;there=sleep:0")
    failpoint("here")
    with pytest.raises(FailpointError, match="here"):
        failpoint("here")
    failpoint("here")
    failpoint("there")


def test_a_failpoint_acts_every_time_where_that_is_asked_for(points: Points) -> None:
    points("here=error@*")
    for _ in range(3):
        with pytest.raises(FailpointError, match="here"):
            failpoint("here")


def test_a_failpoint_sleeps_stops_or_kills_its_process(points: Points) -> None:
    points("nap=sleep:0.2")
    started = time.monotonic()
    failpoint("nap")
    assert time.monotonic() - started >= 0.2
    assert apart(lambda: failpoint("here"), "here=stop") == -signal.SIGSTOP
    assert apart(lambda: failpoint("here"), "here=kill") == -signal.SIGKILL


def test_a_failpoint_armed_by_a_file_acts_once_whoever_passes(points: Points, tmp_path: Path) -> None:
    points(str(tmp_path))
    failpoint("here")
    (tmp_path / "here").write_text("error")
    with pytest.raises(FailpointError):
        failpoint("here")
    failpoint("here")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "die", "kill@", "sleep", "sleep:soon", "kill@-1"])
def test_what_cannot_be_done_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="COMPUTESHARE_FAILPOINTS"):
        Action.parse(text)


def test_every_failpoint_is_documented_and_dies_in_a_test_here() -> None:
    sources = [*ROOT.glob("computeshare/**/*.py"), *ROOT.glob("api/**/*.py")]
    names = {name for path in sources for name in re.findall(r'failpoint\("(\w+)"\)', path.read_text())}
    documented = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "reliability.md").read_text(), re.MULTILINE))
    assert names == documented
    assert names == {
        *WORKER,
        *REDUCER,
        *CHECKPOINT,
        *DISPATCHER,
        *PROJECTOR,
        *NOTIFIER,
        *SCORER,
        "in_leave",
        "after_draft",
    }


NOTIFIER = {"before_notice", "after_notice"}
"""These die in test_webhook_delivery.py."""
SCORER = {"before_score"}
"""This dies in e2e/jobs/test_scoring_workers.py."""

# A worker

WORKER = {"after_compute": False, "before_push": False, "between_stage_and_submit": False, "after_push": True}
"""Failpoint, and whether what the worker had computed counts."""


def seat_session(redis_url: str, job: Job, worker: str) -> SeatSession:
    """A seat as its process runs it, without RQ; it was issued."""
    redis, seat = connect(redis_url), Seat(worker, job.job_id, 1, 1)
    redis.hset(job.store.keys.seats(), worker, seat.id)
    return SeatSession(redis, seat, job.spec, Settings(home=job.root), threading.Event())


def counted(redis: Redis, job: Job) -> list[tuple[int, str]]:
    """The ledger by the events: every micro-batch with the worker it was counted from."""
    events: Any = redis.xrange(job.store.keys.events())
    versions = [json.loads(fields[b"data"]) for _, fields in events if fields[b"type"] == b"version"]
    return [(micro_batch, worker) for version in versions for micro_batch, worker, _ in version["counted"]]


def rescue(job: Job, hand: Hand) -> None:
    """Let `hand` do the round that another left undone, by leases that have run out or backup tasks."""
    before, deadline = job.store.read(), time.monotonic() + 30
    while job.store.read() == before:
        grant = hand.pull()
        if grant.micro_batches:
            hand.send(grant)
        else:
            time.sleep(0.02)
        job.reducer.advance()
        assert time.monotonic() < deadline, "what the dead had leased was given to nobody"


@pytest.fixture
def start(redis: Redis, tmp_path: Path) -> Callable[..., Job]:
    def start(**changes: Any) -> Job:
        job_id = secrets.token_hex(4)
        return Job(redis, job_id, spec_of(**changes), tmp_path / job_id)

    return start


@pytest.mark.parametrize("name", WORKER)
@pytest.mark.slow
def test_a_worker_that_dies_loses_nothing_and_doubles_nothing(
    name: str, start: Callable[..., Job], redis: Redis, redis_url: str
) -> None:
    calm, job = start(), start()
    expected = calm.finish(calm.hand("solo"))
    worker, other = secrets.token_hex(4), job.hand("other")
    job.round(job.hand(worker), other)  # their speeds are known now
    killed(lambda: seat_session(redis_url, job, worker).run("cpu"), name)
    received: Any = redis.hgetall(job.store.keys.received())
    held: Any = redis.hgetall(job.store.keys.leases())
    leased = len(received) or len(held)  # all of the round, where the other one has been idle for too long by then
    assert leased in (2, 4) and len(received) == (leased if WORKER[name] else 0)
    assert len(held) == (4 - leased if WORKER[name] else leased)  # with a submission the next lease is asked for
    staged = list(redis.scan_iter(job.store.keys.staged("*")))
    assert len(staged) == (leased if name == "between_stage_and_submit" else 0)
    assert all(redis.ttl(key) > 0 for key in staged)  # goes by itself
    rescue(job, other)
    entries = counted(redis, job)
    assert sorted(m for m, _ in entries) == list(range(8))
    assert ([w for m, w in entries if m >= 4].count(worker) > 0) == WORKER[name]
    assert job.finish(other) == expected


def test_a_worker_that_dies_as_it_leaves_hands_nothing_back_and_its_leases_run_out(
    start: Callable[..., Job], redis: Redis, redis_url: str
) -> None:
    calm, job = start(), start()
    expected = calm.finish(calm.hand("solo"))
    worker, other = secrets.token_hex(4), job.hand("other")
    job.round(job.hand(worker), other)

    def leave() -> None:
        member = seat_session(redis_url, job, worker).context.session
        member.join(Seat(worker, job.job_id, 1, 1).id, {})
        state = job.store.read()
        assert state is not None and member.lease(str(state.token)).micro_batches
        member.leave("asked to")

    killed(leave, "in_leave")
    assert redis.hget(job.store.keys.sessions(), worker) is not None
    rescue(job, other)
    assert sorted(m for m, _ in counted(redis, job)) == list(range(8))
    assert job.finish(other) == expected


# A reducer

REDUCER = {"after_gather": 0, "before_commit": 0, "after_commit": 1, "after_state": 1}
"""Failpoint, and the version that is published when the reducer dies there in the first round."""
CHECKPOINT = {"in_checkpoint": False, "before_announce": True}
"""Failpoint, and whether the checkpoint is on disk when the reducer dies there."""


def reduce_apart(redis_url: str, job: Job) -> Callable[[], None]:
    """What the reducer that is going to die does: takes the job over, reduces the round, writes the checkpoint."""

    def act() -> None:
        job.redis = connect(redis_url)
        reducer = job.new_reducer()
        reducer.advance()
        reducer.close()

    return act


@pytest.mark.parametrize("name", REDUCER)
def test_a_reducer_that_dies_is_followed_by_one_that_makes_the_same_version_once(
    name: str, start: Callable[..., Job], redis: Redis, redis_url: str
) -> None:
    calm, job = start(), start()
    expected = calm.finish(calm.hand("solo"))
    hand = job.hand("solo")
    hand.send(hand.pull())
    killed(reduce_apart(redis_url, job), name)
    state = job.store.read()
    assert state is not None and state.version == REDUCER[name]
    kept = redis.exists(job.store.keys.state(str(state.token)))
    assert kept == (name != "after_commit")  # the next one has to repeat the step
    job.reducer = job.new_reducer()
    assert job.reducer.advance()
    state = job.store.read()
    assert state is not None and state.version == 1
    assert job.finish(hand) == expected
    assert sorted(m for m, _ in counted(redis, job)) == list(range(24))


def test_a_reducer_that_dies_as_it_drafts_is_followed_by_one_that_makes_the_same_version(
    start: Callable[..., Job], redis: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "BUCKET", 5000)
    calm, job = start(), start()
    expected = calm.finish(calm.hand("solo"))
    hand = job.hand("solo")
    sending = Sending(hand, hand.pull())
    sending.offer(3, 2, 1)
    killed(reduce_apart(redis_url, job), "after_draft", 2)
    lost = set(redis.scan_iter(job.store.keys.draft("*")))
    assert len(lost) == 1 and redis.hkeys(*lost) == [b"3", b"2"] and redis.ttl(*lost) > 0
    job.reducer = job.new_reducer()
    assert job.reducer.advance()
    assert sending.submit() == "accepted"
    job.reducer.advance()
    assert redis.exists(*lost) == 1, "it goes by itself"
    assert job.finish(hand) == expected
    assert sorted(m for m, _ in counted(redis, job)) == list(range(24))


@pytest.mark.parametrize("name", CHECKPOINT)
def test_a_checkpoint_is_whole_or_absent_when_its_writer_dies(
    name: str, start: Callable[..., Job], redis: Redis, redis_url: str
) -> None:
    job = start(checkpoint_every=2, rounds=4)
    hand = job.hand("solo")
    job.round(hand)
    hand.send(hand.pull())
    killed(reduce_apart(redis_url, job), name)
    artifacts = Artifacts(job.root, job.job_id)
    assert (2 in [token.version for token in artifacts.tokens()]) == CHECKPOINT[name]
    job.reducer = job.new_reducer()
    assert job.reducer.advance()
    job.finish(hand)
    assert [token.version for token in artifacts.tokens() if token.version] == [2, 4]
    events: Any = redis.xrange(job.store.keys.events())
    told = [json.loads(f[b"data"])["version"] for _, f in events if f[b"type"] == b"checkpoint"]
    assert [version for version in told if version] == [2, 4]


# The control plane

DISPATCHER = ("before_delivery", "after_delivery")
PROJECTOR = ("in_projection", "before_trim")


@pytest.mark.parametrize("passing", [1, 2], ids=["the first seat", "the second seat"])
@pytest.mark.parametrize("name", DISPATCHER)
def test_a_control_plane_that_dies_hands_out_each_seat_once(
    name: str,
    passing: int,
    redis: Redis,
    redis_url: str,
    dispatcher: Dispatcher,
    database: Database,
    queue: str,
    create: Callable[..., str],
    clock: Clock,
    tmp_path: Path,
) -> None:
    workers = sorted(online(redis, queue) for _ in range(2))
    create()

    def dispatch() -> None:
        again = Database(f"sqlite:///{tmp_path / 'computeshare.db'}")
        Dispatcher(again, tmp_path / "artifacts").step(connect(redis_url))

    killed(dispatch, name, passing)
    restarted = Dispatcher(database, tmp_path / "artifacts")
    for _ in range(3):
        clock.ms += 1000
        restarted.step(redis)
    issued = seats(database)
    assert [(s.worker, s.number, s.attempt, s.state) for s in issued] == [
        (workers[0], 1, 1, "issued"),
        (workers[1], 2, 1, "issued"),
    ]
    assert [queued(redis, worker) for worker in workers] == [[seat.id] for seat in issued]


@pytest.mark.parametrize("name", PROJECTOR)
def test_a_control_plane_that_dies_takes_every_event_once(
    name: str,
    redis: Redis,
    redis_url: str,
    database: Database,
    jobs: Jobs,
    history: History,
    tmp_path: Path,
) -> None:
    spec = JobSpec(dataset="digits", model="mlp", rounds=30)
    job = jobs.create(spec).id
    feed = Feed(redis, job, spec.plan)
    feed.open()
    feed.join()
    feed.commit()

    def project() -> None:
        Projector(Database(f"sqlite:///{tmp_path / 'computeshare.db'}")).step(connect(redis_url))

    killed(project, name)
    assert redis.xlen(feed.keys.events()) > 0  # nothing was trimmed
    stored = jobs.show(job).version
    assert stored == (1 if name == "before_trim" else 0)
    feed.commit()
    Projector(database).step(redis)
    shown = jobs.show(job)
    assert (shown.version, shown.accepted) == (2, 8)
    with database.engine.connect() as connection:
        assert len(connection.execute(select(table(VersionRow))).all()) == 2
        assert len(connection.execute(select(table(Submission))).all()) == 8
    assert [epoch.missing for epoch in history.ledger(job).epochs] == [0]
