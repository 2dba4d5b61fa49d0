"""A recipe's own metrics are stored with the scores that they belong to."""

import pytest
from redis import Redis

from api.database import Database
from api.jobs.history import History
from api.jobs.service import Jobs
from api.projection.projector import Projector
from api.tables import Event
from computeshare.jobspec.spec import JobSpec
from tests.support.event_stream import Feed
from tests.support.rows import rows

SPEC = JobSpec(dataset="digits", model="mlp", rounds=4, validation=0.1, evaluate_every=1)


@pytest.fixture
def feed(redis: Redis, jobs: Jobs) -> Feed:
    feed = Feed(redis, jobs.create(SPEC).id, SPEC.plan)
    feed.open()
    feed.join()
    return feed


def test_own_metrics_are_told_of_job_checkpoints_series_and_timeline(
    redis: Redis, feed: Feed, database: Database, jobs: Jobs, history: History
) -> None:
    test = {"loss": 1.5, "accuracy": None, "samples": 360, "own_metrics": {"f1": 0.3}}
    first = {"f1": 0.5, "recall": float("nan")}
    for own in (first, {"f1": 0.25, "recall": 0.75}, {}):
        feed.commit()
        feed.save()
        feed.score(0.5, own_metrics=own)
    feed.score(0.5, version=1, own_metrics=first, test=test)
    Projector(database).step(redis)
    job = feed.keys.job_id
    shown = jobs.show(job)
    assert shown.own_metrics is None  # of version 3
    assert shown.tested and shown.tested.own_metrics == {"f1": 0.3}
    found = history.metrics(job).own_metrics
    assert {name: [(p.version, p.value) for p in points] for name, points in found.items()} == {
        "f1": [(1, 0.5), (2, 0.25)],
        "recall": [(2, 0.75)],
    }
    told = [row.data.get("own_metrics") for row in rows(database, Event) if row.type in ("scored", "tested")]
    assert told == [{"f1": 0.5, "recall": None}, {"f1": 0.25, "recall": 0.75}, None, {"f1": 0.3}]
    feed.open(version=2, incarnation=2, restored=True)
    Projector(database).step(redis)
    assert jobs.show(job).own_metrics == {"f1": 0.25, "recall": 0.75}
