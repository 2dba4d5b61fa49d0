"""A job at a control plane with a version to download: the initial weights of its model."""

from redis import Redis

from computeshare.checkpoints.store import Artifacts
from computeshare.client import ComputeShare, Job
from computeshare.jobspec.spec import JobSpec
from computeshare.settings import Settings
from tests.support.evaluated_job import save
from tests.support.event_stream import Feed
from tests.support.wait import wait_until


def trained_job(cs: ComputeShare, redis: Redis, settings: Settings, **spec: object) -> Job:
    """Create a job and publish its version 1, scored 0.75, with the weights that its model gets from seed 1."""
    job = cs.jobs.create(spec)
    parsed = JobSpec.model_validate(job.spec)
    artifacts = Artifacts(settings.artifacts_dir, job.id)
    token = save(artifacts, parsed, 1)
    manifest = artifacts.manifest(token)
    feed = Feed(redis, job.id, parsed.plan)
    feed.open()
    feed.join()
    feed.commit()
    feed.score(0.75)
    feed.send("checkpoint", token=str(token), version=1, sha256=manifest.sha256, bytes=manifest.bytes, path=str(token))
    wait_until(job.checkpoints)
    return job.refresh()
