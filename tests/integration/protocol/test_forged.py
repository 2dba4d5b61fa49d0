"""Someone who can write to the broker puts in events and rounds that cannot be: the job finishes all the same, for the
files are believed, and its timeline tells of it.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ResponseError
from sqlalchemy import delete, select

from api.database import Database
from api.jobs.history import History
from api.jobs.service import Jobs
from api.projection.projector import Projector
from api.publication.outbox import SEAT
from api.scheduler.dispatcher import Dispatcher
from computeshare.checkpoints.store import Artifacts
from computeshare.errors import ComputeShareError, Fenced, JobGone, LostClaim
from tests.support.job_reducer import Job, spec_of
from tests.support.rounds import take_seat
from tests.support.scheduling_clock import Clock, online
from tests.support.wait import wait_until

FORGED = "1.9." + "d" * 16
"""The last version, as nobody has made it."""
TURNS = 60


class Attacked:
    """A job of nine rounds with a checkpoint of version 3, all of it real but for the time, and a hostile writer."""

    def __init__(self, redis: Redis, database: Database, jobs: Jobs, dispatcher: Dispatcher, clock: Clock) -> None:
        self.redis, self.database, self.jobs, self.dispatcher, self.clock = redis, database, jobs, dispatcher, clock
        self.root = dispatcher._artifacts_dir
        self.spec = spec_of(rounds=9, queue=f"q{clock.ms}")
        self.id = jobs.create(self.spec).id
        self.job = Job(redis, self.id, self.spec, self.root)
        self.projector = Projector(database, self.root)
        self.artifacts = Artifacts(self.root, self.id)
        self.hand = self.job.hand("honest")
        self.is_wanted = self.has_reducer = True

    @property
    def round_key(self) -> str:
        return self.job.store.keys.round()

    def announce(self, kind: str, /, **data: Any) -> None:
        at_ms = 1_800_000_000_000
        fields: Any = {"type": kind, "at": at_ms, "data": json.dumps(data)}
        self.redis.xadd(self.job.store.keys.events(), fields)

    def tend(self) -> None:
        """A turn of the control plane, some seconds later."""
        self.projector.step(self.redis)
        self.clock.ms += 6000
        online(self.redis, self.spec.queue, worker="0123456789ab")
        self.dispatcher.step(self.redis)
        with self.database.writing() as connection:
            mine = SEAT.c.job_id == self.id
            self.is_wanted = bool(connection.execute(select(SEAT.c.id).where(mine, SEAT.c.ended_ms.is_(None))).all())
            connection.execute(delete(SEAT).where(mine))  # nobody serves them here: a new one is made if one is wanted

    def compute(self) -> None:
        """What the worker can do, who joins again where it has to, if the control plane has a seat for it."""
        if not self.is_wanted:
            return
        try:
            grant = self.hand.pull()
            if grant.micro_batches:
                self.hand.send(grant)
        except (Fenced, JobGone):
            take_seat(self.hand.session)
        except (AssertionError, ComputeShareError, ResponseError):
            pass  # what it was given is of no use to it

    def reduce(self) -> None:
        """What the reducers do: one that lets go of the job is followed by another."""
        if self.has_reducer:
            try:
                self.has_reducer = self.job.reducer.advance()
            except LostClaim:
                self.has_reducer = False
            if not self.has_reducer:
                self.job.reducer.close()
        elif self.job.store.spec() is not None:
            self.job.reducer = self.job.new_reducer()
            self.has_reducer = True

    def finish(self) -> None:
        """Until the last version is on disk and the control plane knows of it."""
        for _ in range(TURNS):
            self.tend()
            self.compute()
            self.reduce()
            self.projector.step(self.redis)
            shown = self.jobs.show(self.id)
            if (shown.version, shown.durable_version) == (9, 9) and self.artifacts.tokens()[-1].version == 9:
                return
        raise AssertionError(f"stuck: {self.redis.hgetall(self.round_key)}, {shown}")


@pytest.fixture
def attacked(redis: Redis, database: Database, jobs: Jobs, dispatcher: Dispatcher, clock: Clock) -> Attacked:
    return Attacked(redis, database, jobs, dispatcher, clock)


def rounds_say(**fields: str) -> Callable[[Attacked], None]:
    return lambda job: job.redis.hset(job.round_key, mapping=fields) and None  # type: ignore[arg-type,func-returns-value]


def announced(kind: str, /, **data: Any) -> Callable[[Attacked], None]:
    return lambda job: job.announce(kind, **data)


def all_of(*attacks: Callable[[Attacked], None]) -> Callable[[Attacked], None]:
    return lambda job: [attack(job) for attack in attacks] and None  # type: ignore[func-returns-value]


def received_garbage(job: Attacked) -> None:
    job.redis.hset(job.job.store.keys.received(), "0", "garbage")


def without_weights(job: Attacked) -> None:
    state = job.job.store.read()
    assert state is not None
    job.redis.delete(job.job.store.keys.weights(str(state.token)))
    job.job.reducer.close()
    job.job.reducer = job.job.new_reducer()


SAVED = {"token": FORGED, "version": 9, "sha256": "d" * 64, "bytes": 400, "path": FORGED}
DONE = {"token": FORGED, "version": 9, "base": FORGED, "epoch": 0, "loss": 0.1, "sha256": "d" * 64, "counted": []}
OPENED = {"token": "99.8." + "d" * 16, "version": 8, "incarnation": 99, "sha256": "d" * 64, "restored": True}
SCORED = {"token": FORGED, "version": 9, "loss": 0.0, "accuracy": 1.0, "samples": 360}
SAYS_SO, SILENT = True, False
"""Whether the timeline tells of it: an event that the disk does not bear out changes nothing, so nothing is mended."""
ATTACKS: dict[str, tuple[Callable[[Attacked], None], bool]] = {
    "finished too early": (rounds_say(status="finished"), SAYS_SO),
    "finished without a file": (rounds_say(status="finished", token=FORGED, version="9"), SAYS_SO),
    "no token": (rounds_say(token="garbage"), SAYS_SO),
    "no number": (rounds_say(first="abc"), SAYS_SO),
    "another round": (rounds_say(first="400", count="1"), SAYS_SO),
    "fewer than it takes": (rounds_say(needed="1"), SAYS_SO),
    "an end": (rounds_say(status="cancelled"), SAYS_SO),
    "no status": (rounds_say(status="bogus"), SAYS_SO),
    "an incarnation": (rounds_say(token="7.4." + "d" * 16), SILENT),
    "no submission": (received_garbage, SAYS_SO),
    "no weights": (without_weights, SAYS_SO),
    "a checkpoint": (announced("checkpoint", **SAVED), SILENT),
    "the last version": (announced("version", **DONE, seconds={}), SAYS_SO),
    "an opening": (announced("opened", **OPENED, parameters=1, kind={}), SILENT),
    "the end of it all": (
        all_of(
            announced("version", **DONE, seconds={}),
            announced("checkpoint", **SAVED),
            announced("scored", **SCORED),
            rounds_say(status="finished", token=FORGED, version="9"),
        ),
        SAYS_SO,
    ),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_job_finishes_whatever_is_forged(attacked: Attacked, history: History, attack: str) -> None:
    forge, says_so = ATTACKS[attack]
    for _ in range(4):
        attacked.job.round(attacked.hand)
    attacked.reduce()
    attacked.tend()
    wait_until(attacked.artifacts.tokens)  # a thread writes the checkpoint
    assert (attacked.jobs.show(attacked.id).version, attacked.artifacts.tokens()[-1].version) == (4, 3)
    forge(attacked)
    attacked.projector.step(attacked.redis)
    shown = attacked.jobs.show(attacked.id)
    assert (shown.durable_version, shown.status) == (3, "queued")  # workers without a name are no more than that
    attacked.finish()
    assert (
        attacked.jobs.show(attacked.id).weights_sha256
        == attacked.artifacts.manifest(attacked.artifacts.tokens()[-1]).sha256
    )
    epochs = history.ledger(attacked.id).epochs
    assert [(epoch.samples, epoch.counted, epoch.missing) for epoch in epochs] == [(576, 576, 0)]
    assert ("mended" in [event.type for event in history.timeline(attacked.id)]) == says_so
