"""The Python client against the real control plane on a real broker."""

import csv
import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from redis import Redis

from api.schemas import EpochPublic, EstimatePublic, JobWorkerPublic, SubmissionPublic
from computeshare.checkpoints.store import Artifacts
from computeshare.client import ComputeShare, Job, JobFailed, Problem
from computeshare.client.api.models import EpochLedger, Estimate, Event, JobWorker, Submission
from computeshare.client.metrics import SERIES
from computeshare.jobspec.spec import JobSpec
from computeshare.settings import Settings
from computeshare.types import Token
from tests.support.checkpoints import write_checkpoint
from tests.support.coroutines import asynchronously
from tests.support.event_stream import Feed
from tests.support.served_api import serving
from tests.support.wait import wait_until

PATIENCE_S = 20


@pytest.fixture(scope="module")
def settings(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return Settings(home=tmp_path_factory.mktemp("home"), redis_url=redis_url, url=None, token="secret")


@pytest.fixture(scope="module")
def url(settings: Settings) -> Iterator[str]:
    with serving(settings) as (url, _):
        yield url


@pytest.fixture
def cs(url: str, tmp_path: Path) -> Iterator[ComputeShare]:
    with ComputeShare(url, "secret", cache=tmp_path / "cache") as found:
        yield found


@pytest.fixture
def job(cs: ComputeShare) -> Iterator[Job]:
    made = cs.jobs.create(dataset="digits", model="mlp", queue="sdk", rounds=40, name="<b>first</b>")
    yield made
    if not made.refresh().ended:
        made.cancel()


@pytest.fixture
def feed(redis: Redis, job: Job) -> Feed:
    found = Feed(redis, job.id, JobSpec.model_validate(job.spec).plan)
    found.open()
    return found


def seen(job: Job, version: int) -> None:
    """Wait until the control plane has read that far."""
    deadline = threading.Event()
    timer = threading.Timer(PATIENCE_S, deadline.set)
    timer.start()
    for _ in job.events():
        if job.version >= version or deadline.is_set():
            break
    timer.cancel()
    assert job.version >= version


def test_the_clients_words_are_the_apis() -> None:
    assert set(Submission.__annotations__) <= set(SubmissionPublic.model_fields)
    assert set(JobWorker.__annotations__) <= set(JobWorkerPublic.model_fields)
    assert set(EpochLedger.__annotations__) == set(EpochPublic.model_fields)
    assert set(Estimate.__annotations__) == set(EstimatePublic.model_fields)


def test_a_job_is_made_found_and_changed(cs: ComputeShare, job: Job) -> None:
    assert cs.jobs.get(job.id).spec["rounds"] == 40
    assert [one.id for one in cs.jobs.list("queued", "sdk")] == [job.id]
    assert job.pause().status == "paused" and cs.jobs.get(job.id).status == "paused"
    assert job.resume().status == "queued"
    assert job.prioritise(7).priority == 7 and cs.jobs.get(job.id).priority == 7
    with pytest.raises(Problem, match="only a failed job can be retried"):
        job.retry()
    with pytest.raises(Problem, match="cancel it first"):
        job.delete()
    assert job.cancel().ended
    with pytest.raises(JobFailed, match=f"job {job.id} was cancelled"):
        job.wait(PATIENCE_S)
    assert "&lt;b&gt;first&lt;/b&gt;" in job._repr_html_()


def test_a_job_that_nobody_serves_is_not_waited_for_longer_than_allowed(cs: ComputeShare, job: Job) -> None:
    wait_until(lambda: (cs.jobs.get(job.id).reason or "").startswith("Needs"))
    with pytest.raises(TimeoutError, match="still queued: Needs 1 worker on queue sdk"):
        job.wait(0.5)


def test_what_workers_did_is_told_as_series_submissions_and_ledger(cs: ComputeShare, job: Job, feed: Feed) -> None:
    feed.join()
    for _ in range(3):
        feed.commit(loss=2.0)
    feed.submit(99, outcome="stale")
    feed.score(0.9)
    feed.commit()
    seen(job, 4)
    metrics = job.metrics()
    assert [(point.version, point.value) for point in metrics.train_loss] == [(1, 2.0), (2, 2.0), (3, 2.0), (4, 1.0)]
    assert metrics.to_dict()["test_accuracy"] == {3: 0.9}
    assert [row["version"] for row in metrics.rows()] == [1, 2, 3, 4]
    assert set(SERIES) < set(metrics.rows()[0])
    assert [point.version for point in job.metrics(since=2).train_loss] == [3, 4]
    lines = list(csv.DictReader(cs.client.metrics_csv(job.id).splitlines()))
    assert [(line["version"], line["train_loss"], line["test_accuracy"]) for line in lines] == [
        ("1", "2.0", ""),
        ("2", "2.0", ""),
        ("3", "2.0", "0.9"),
        ("4", "1.0", ""),
    ]
    submissions = list(job.submissions(limit=None))
    assert len(submissions) == 17 and submissions[0]["id"] > submissions[-1]["id"]
    assert [one["outcome"] for one in job.submissions(outcome="stale")] == ["stale"]
    (worker,) = job.workers()
    assert (worker["name"], worker["accepted"], worker["stale"]) == ("mac", 16, 1)
    (epoch,) = job.ledger()
    assert epoch["counted"] == epoch["samples"] == 4 * 4 * 32


def test_an_estimate_of_a_job_that_nobody_serves_says_why_there_is_none(job: Job) -> None:
    assert job.estimate() == {"low": None, "likely": None, "high": None, "reason": "The job is not running"}


def test_an_invite_is_listed_until_it_is_withdrawn(cs: ComputeShare) -> None:
    invites = cs.client.invites
    made = invites.create("lab", 5)
    assert [one["status"] for one in invites.list() if one["id"] == made["id"]] == ["pending"]
    assert invites.show(made["id"])["queue"] == "lab"
    invites.withdraw(made["id"])
    with pytest.raises(Problem, match="invite"):
        invites.withdraw(made["id"])


def test_weights_are_loaded_checked_and_kept(
    cs: ComputeShare, settings: Settings, job: Job, feed: Feed, tmp_path: Path
) -> None:
    with pytest.raises(Problem, match="there are: none yet"):
        job.load()
    tensors = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.ones(4, np.float32)}
    sha256 = hashlib.sha256(b"".join(tensor.tobytes() for tensor in tensors.values())).hexdigest()
    token = Token(1, 1, sha256[:16])
    write_checkpoint(Artifacts(settings.artifacts_dir, job.id), token, tensors, b"", sha256, 0, 0)
    feed.commit()
    feed.send("checkpoint", token=str(token), version=1, sha256=sha256, bytes=400, path=str(token))
    seen(job, 1)
    state = job.load(1)
    assert list(state) == ["b", "a"]  # as in the model, not by name
    assert {name: tensor.tolist() for name, tensor in state.items()} == {
        name: tensor.tolist() for name, tensor in tensors.items()
    }
    state["a"].zero_()  # a user's own to change
    assert job.load("latest")["a"].sum().item() == 4
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [f"{sha256}.safetensors"]
    assert [checkpoint["version"] for checkpoint in job.checkpoints()] == [1]


def test_following_and_streaming_tell_the_same_timeline(cs: ComputeShare, job: Job, feed: Feed) -> None:
    feed.join()
    feed.commit()
    seen(job, 1)
    job.cancel()
    followed = [event for event in job.events(after=0) if event.type != "job"]

    async def stream() -> list[Event]:
        return [event async for event in cs.jobs.get(job.id).stream(after=0) if event.type != "job"]

    assert asynchronously(stream()) == followed
    assert [event.type for event in followed] == ["created", "opened", "joined", "version", "cancelled"]
