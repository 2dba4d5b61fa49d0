"""The scores on the test set of a job with a validation split follow its rows and its disk."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis import Redis

from api.database import Database
from api.jobs.service import Jobs
from api.projection.disk_reconcile import reconcile
from api.projection.projector import Projector
from api.tables import Event
from computeshare.checkpoints.store import Artifacts
from computeshare.jobspec.spec import JobSpec
from computeshare.types import Token
from tests.support.checkpoints import write_checkpoint
from tests.support.event_stream import Feed, token
from tests.support.rows import rows

SPEC = JobSpec(dataset="digits", model="mlp", rounds=4, validation=0.1, evaluate_every=1)


def on_test_set(accuracy: float) -> dict[str, Any]:
    return {"loss": 1.5, "accuracy": accuracy, "samples": 360}


@pytest.fixture
def feed(redis: Redis, jobs: Jobs) -> Feed:
    feed = Feed(redis, jobs.create(SPEC).id, SPEC.plan)
    feed.open()
    feed.join()
    return feed


@pytest.fixture
def projector(database: Database) -> Projector:
    return Projector(database)


def trained(feed: Feed, *accuracies: float) -> None:
    for accuracy in accuracies:
        feed.commit()
        feed.save()
        feed.score(accuracy)


def test_a_score_that_is_announced_again_keeps_the_test_sets_and_is_told_once(
    redis: Redis, feed: Feed, projector: Projector, jobs: Jobs, database: Database
) -> None:
    trained(feed, 0.5, 0.75, 0.625)
    projector.step(redis)
    feed.score(0.75, version=2, test=on_test_set(0.7))
    projector.step(redis)
    feed.score(0.75, version=2)
    feed.score(0.75, version=2, test=on_test_set(0.7))
    projector.step(redis)
    shown = jobs.show(feed.keys.job_id)
    assert shown.tested and (shown.tested.version, shown.tested.accuracy) == (2, 0.7)
    assert shown.tested_last is None  # version 3 is not tested
    told = [row.data for row in rows(database, Event) if row.type == "tested"]
    assert told == [{"version": 2, **on_test_set(0.7)}]


def test_a_better_version_and_a_restore_change_what_is_told_of_the_test_set(
    redis: Redis, feed: Feed, projector: Projector, jobs: Jobs
) -> None:
    trained(feed, 0.5)
    feed.score(0.5, test=on_test_set(0.4))
    trained(feed, 0.75)
    projector.step(redis)
    assert jobs.show(feed.keys.job_id).tested is None  # of version 2, which is not tested
    feed.open(version=1, incarnation=2, restored=True)
    projector.step(redis)
    shown = jobs.show(feed.keys.job_id)
    assert shown.best_version == 1 and shown.tested and shown.tested.accuracy == 0.4


def test_a_score_whose_event_was_lost_is_read_from_the_disk(
    redis: Redis, feed: Feed, projector: Projector, jobs: Jobs, database: Database, tmp_path: Path
) -> None:
    trained(feed, 0.5)
    projector.step(redis)
    artifacts, saved = Artifacts(tmp_path, feed.keys.job_id), Token.parse(token(1))
    write_checkpoint(artifacts, saved, {"w": np.zeros(1, np.float32)}, b"state", "0" * 64, 0, 4)
    score = {"loss": 0.5, "accuracy": 0.5, "samples": 144}
    for test in ({}, {"test": on_test_set(0.4)}):
        artifacts.save_score(saved, score | test)
        reconcile(database, tmp_path, feed.keys.job_id)
        shown = jobs.show(feed.keys.job_id)
        assert bool(shown.tested) == bool(test)
    assert shown.tested and shown.tested.accuracy == 0.4
