"""A job that stops early is complete with the version that its scores name, however far training was by then."""

import threading
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from api.database import Database
from api.jobs.history import History
from api.jobs.service import Jobs
from api.projection.projector import Projector
from api.tables import Outbox
from computeshare.checkpoints.store import Artifacts
from computeshare.errors import LostClaim
from computeshare.evaluator.evaluator import Evaluator
from tests.support.job_reducer import Job, spec_of
from tests.support.rounds import events
from tests.support.rows import rows


class Stopping:
    """A job with `stop`, its real reducer and evaluator, and the control plane that stores what they tell."""

    def __init__(self, redis: Redis, database: Database, jobs: Jobs, root: Path, **fields: Any) -> None:
        spec = spec_of(rounds=12, evaluate_every=3, **fields)
        self.redis, self.id, self.database = redis, jobs.create(spec).id, database
        self.job = Job(redis, self.id, spec, root)
        self.hand = self.job.hand("worker")
        self.artifacts, self.projector = Artifacts(root, self.id), Projector(database, root)
        self.evaluator = Evaluator(redis, root, root.parent / "data", threading.Event())

    def train(self, rounds: int) -> None:
        for _ in range(rounds):
            self.job.round(self.hand)
        self.job.reducer.checkpoints.wait()

    def score(self) -> None:
        """Score all that is to be scored of this job, newest first, and store it."""
        spec = self.job.spec
        for token in reversed([one for one in self.artifacts.tokens() if spec.wants_score(one.version)]):
            self.evaluator._settle(self.artifacts, self.id, spec, token)
        self.projector.step(self.redis)


def test_a_job_is_complete_with_the_version_that_reached_its_target(
    redis: Redis, database: Database, jobs: Jobs, history: History, tmp_path: Path
) -> None:
    stop = {"metric": "loss", "at": 100.0}
    one = Stopping(redis, database, jobs, tmp_path / "artifacts", stop=stop, validation=0.1)
    one.train(8)
    one.projector.step(redis)
    assert jobs.show(one.id).version == 8
    one.score()
    shown = jobs.show(one.id)
    assert (shown.status, shown.version, shown.rounds_total, shown.durable_version) == ("completed", 3, 3, 3)
    assert shown.reason and "Stopped early: loss" in shown.reason and "at version 3 reached 100" in shown.reason
    assert shown.tested and (shown.tested.version, shown.tested.samples) == (3, 360) and shown.tested_last is None
    token = one.artifacts.tokens()[-1]
    assert shown.weights_sha256 == one.artifacts.manifest(token).sha256
    assert [c.version for c in history.checkpoints(one.id).items] == [3]
    epoch = history.ledger(one.id).epochs[0]
    assert (epoch.samples, epoch.counted, epoch.missing) == (192, 192, 0)
    assert [row.payload for row in rows(database, Outbox) if row.kind == "end"] == [{"status": "completed"}]
    with pytest.raises(LostClaim):  # the reducer trained on meanwhile; what it writes is of a branch given up
        one.train(1)
    one.score()
    assert (jobs.show(one.id).status, jobs.show(one.id).version) == ("completed", 3)
    assert one.artifacts.tokens()[-1].version == 3
    one.job.store.purge()


def test_nothing_stops_while_an_earlier_version_is_still_to_be_scored(
    redis: Redis, database: Database, jobs: Jobs, tmp_path: Path
) -> None:
    one = Stopping(redis, database, jobs, tmp_path / "artifacts", stop={"metric": "loss", "at": 100.0})
    one.train(6)
    spec, newest = one.job.spec, one.artifacts.tokens()[-1]
    one.evaluator._settle(one.artifacts, one.id, spec, newest)
    assert not events(one.job.store, "stopped")
    one.projector.step(redis)
    assert jobs.show(one.id).status != "completed"
    one.score()
    assert (jobs.show(one.id).status, jobs.show(one.id).version) == ("completed", 3)
    one.job.store.purge()
