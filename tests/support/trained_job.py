"""A job at a control plane with a version to download: the initial weights of its model."""

from redis import Redis

from computeshare.checkpoints.store import Artifacts
from computeshare.client import ComputeShare, Job
from computeshare.jobspec.spec import JobSpec
from computeshare.settings import Settings
from computeshare.tasks import modules
from computeshare.tasks.registry import task_of
from computeshare.types import Token
from tests.support.checkpoints import write_checkpoint
from tests.support.event_stream import Feed, token
from tests.support.wait import wait_until


def trained_job(cs: ComputeShare, redis: Redis, settings: Settings, **spec: object) -> Job:
    """Create a job and publish its version 1, scored 0.75, with the weights that its model gets from seed 1."""
    job = cs.jobs.create(spec)
    parsed = JobSpec.model_validate(job.spec)
    module = task_of(parsed).module(1)
    layout = modules.layout_of(module)
    weights = modules.weights_of(module, layout)
    artifacts, sha256 = Artifacts(settings.artifacts_dir, job.id), layout.digest(weights)
    manifest = write_checkpoint(artifacts, Token.parse(token(1)), layout.views(weights), b"state", sha256, 0, 0)
    feed = Feed(redis, job.id, parsed.plan)
    feed.open()
    feed.join()
    feed.commit()
    feed.send("checkpoint", token=token(1), version=1, sha256=sha256, bytes=manifest.bytes, path=token(1))
    feed.score(0.75)
    wait_until(lambda: [one for one in job.checkpoints() if one["best"]])
    return job.refresh()
