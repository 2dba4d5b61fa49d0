"""Machines that are not equally fast, with real replicas: nothing that they do moves a bit."""

import uuid
from collections import Counter
from pathlib import Path

import torch
from redis import Redis

from computeshare.codecs.messages import decode_weights, encode_update, weights_parts
from computeshare.codecs.registry import CODECS
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol.lease_policy import shortest
from computeshare.protocol.worker_session import Grant, WorkerSession
from computeshare.tasks.registry import task_of
from computeshare.training.computation import replica_of
from tests.support.job_reducer import Job
from tests.support.rounds import take_seat
from tests.support.unequal import QUARTER, Hand, Unequal

SPEC = JobSpec.model_validate(
    {
        "dataset": "digits",
        "model": "mlp",
        "micro_batch": 20,
        "rounds": 4,
        "strategy": {"kind": "local", "inner_steps": 2, "replicas": 16},
        "threads": 1,
    }
)


def hand(redis: Redis, job: Job, worker: str) -> Hand:
    """A worker whose replica is real."""
    spec = job.spec
    instance = task_of(spec).instance(spec.seed, "train", Path())
    layout, replica = instance.layout, replica_of(spec, instance, torch.device("cpu"))
    session = WorkerSession(redis, job.job_id, worker, f"session of {worker}")
    take_seat(session)
    up, down = CODECS[spec.codecs.up], CODECS[spec.codecs.down]
    loaded = ""

    def lease() -> Grant:
        nonlocal loaded
        grant = session.lease(loaded)
        while grant.answer == "stale":
            loaded = grant.token
            parts, grant = session.pull(loaded, weights_parts(layout))
            assert parts is not None
            replica.load(decode_weights(down, parts, layout))
        return grant

    def submit(grant: Grant) -> str:
        updates = []
        for unit in grant.micro_batches:
            update = replica.compute(unit)
            seed = spec.plan.generator_seed(unit)
            updates.append((unit, encode_update(up, update.vector, update.buffers, layout, seed), update.loss))
        return session.submit(grant.token, uuid.uuid4().hex, updates, {}).outcome

    return Hand(lease, submit)


def finished(redis: Redis, job: Job, slowness: dict[str, float]) -> tuple[str, Unequal]:
    """The digest of the job's last weights, and how it came to them."""
    torch.set_num_threads(1)
    hands = {worker: hand(redis, job, worker) for worker in slowness}
    unequal = Unequal(job.reducer.session, hands, slowness)
    while (state := job.store.read()) and state.status == "running":
        unequal.play()
        job.reducer.advance()
    job.reducer.close()
    return job.digest(), unequal


def test_with_a_slow_machine_local_rounds_take_as_long_as_they_must_and_end_in_the_same_bits(
    redis: Redis, job_id: str, tmp_path: Path
) -> None:
    alone, _ = finished(redis, Job(redis, f"{job_id}1", SPEC, tmp_path / "alone"), {"a": 1})
    four, unequal = finished(redis, Job(redis, f"{job_id}4", SPEC, tmp_path / "four"), dict(QUARTER))
    assert four == alone
    course, best = unequal.course, shortest(16, [*QUARTER.values()])
    assert best == 5 and 0.95 * sum(1 / each for each in QUARTER.values()) < 16 / 5
    whole = [rounds for rounds, done in zip(course.rounds, course.done, strict=True) if done.total() == 16]
    assert len(whole) >= 3 and all(rounds < best / 0.95 for rounds in whole[1:])
    assert sum(course.done, Counter())["slow"] >= len(whole)
