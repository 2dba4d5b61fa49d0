"""A job reducer on a real broker, and workers moved by hand."""

import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from redis import Redis

from computeshare.checkpoints.store import Artifacts
from computeshare.codecs.messages import decode_weights, encode_update, weights_parts
from computeshare.codecs.registry import CODECS
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol.reducer_session import ReducerSession
from computeshare.protocol.round_store import RoundStore
from computeshare.protocol.worker_session import Grant, WorkerSession
from computeshare.reducer.job_reducer import JobReducer
from computeshare.tasks.base import TaskInstance
from computeshare.tasks.modules import frozen_digest
from computeshare.tasks.registry import task_of
from computeshare.training.computation import replica_of
from computeshare.types import Blob
from computeshare.worker.seat.weights_receiver import WeightsReceiver
from tests.support.rounds import take_seat

ADAM = {"name": "Adam", "lr": 0.01}


def spec_of(**changes: Any) -> JobSpec:
    values = {"dataset": "digits", "model": "mlp", "micro_batch": 16, "rounds": 6, "checkpoint_every": 3}
    values |= {"optimizer": ADAM, "evaluate_every": 0, "threads": 1}
    return JobSpec.model_validate({name: value for name, value in (values | changes).items() if value is not None})


Spoil = Callable[[list[Blob]], list[Blob]]


class Hand:
    """A worker in this process, moved by hand."""

    def __init__(
        self, redis: Redis, job_id: str, spec: JobSpec, worker: str, instance: TaskInstance | None = None
    ) -> None:
        """`instance`: what it trains; default: the job's task."""
        torch.set_num_threads(1)
        instance = instance or task_of(spec).instance(spec.seed, "train", Path())
        self.layout, self.module = instance.layout, instance.module
        self.replica = replica_of(spec, instance, torch.device("cpu"))
        self.session = WorkerSession(redis, job_id, worker, f"session of {worker}")
        self.spec, self.up, self.down = spec, CODECS[spec.codecs.up], CODECS[spec.codecs.down]
        take_seat(self.session, frozen=frozen_digest(instance.module))

    def pull(self) -> Grant:
        """Load the current version and lease a share of its round."""
        parts, grant = self.session.pull(self.session.lease("").token, weights_parts(self.layout))
        assert parts is not None
        self.replica.load(decode_weights(self.down, parts, self.layout))
        return grant

    def send(self, grant: Grant, spoil: Spoil = lambda message: message) -> str:
        """Compute and submit a grant, `spoil`ed if need be."""
        updates = []
        for m in grant.micro_batches:
            update = self.replica.compute(m)
            seed = self.spec.plan.generator_seed(m)
            message = encode_update(self.up, update.vector, update.buffers, self.layout, seed)
            updates.append((m, spoil(message), update.loss))
        return self.session.submit(grant.token, uuid.uuid4().hex, updates, {}).outcome


class Worker:
    """A hand that computes each unit on the version that its lease names."""

    def __init__(self, hand: Hand) -> None:
        self.hand, self.inbox, self.loaded = hand, WeightsReceiver(hand.session, hand.spec.codecs.down, hand.layout), ""

    def turn(self, spoil: Spoil = lambda message: message) -> bool:
        """Compute and submit one lease, `spoil`ed if need be, if there is one."""
        grant = self.hand.session.lease(self.loaded)
        if grant.answer != "leased":
            return False
        if grant.token != self.loaded:
            weights = self.inbox.fetch(self.hand.session, grant.token)
            assert weights is not None
            self.hand.replica.load(weights)
            self.loaded = grant.token
        assert self.hand.send(grant, spoil) == "accepted"
        return True

    def finish(self, job: "Job") -> str:
        """Compute all of the job alone; the digest of the last version."""
        while (state := job.store.read()) and state.status == "running":
            while self.turn():
                pass
            job.reducer.advance()
        job.reducer.close()
        return job.digest()


class Job:
    """A job with its reducer and any number of hands."""

    def __init__(self, redis: Redis, job_id: str, spec: JobSpec, root: Path) -> None:
        self.redis, self.job_id, self.spec, self.root = redis, job_id, spec, root
        self.store = RoundStore(redis, job_id)
        self.store.publish(spec.model_dump_json())
        self.reducer = self.new_reducer()
        assert self.reducer.advance()

    def new_reducer(self) -> JobReducer:
        """What a reducer is that takes over: it knows nothing but Redis and the disk."""
        self.redis.delete(self.store.keys.reducer())
        reducer = ReducerSession(self.redis, self.job_id, "reducer")
        assert reducer.claim("host", 1, 60_000)
        return JobReducer(reducer, self.root, self.root / "bundles")

    def hand(self, worker: str, instance: TaskInstance | None = None) -> Hand:
        return Hand(self.redis, self.job_id, self.spec, worker, instance)

    def round(self, *hands: Hand) -> None:
        """One round by these hands, in this order."""
        state = self.store.read()
        assert state is not None
        grants = [hand.pull() for hand in hands]
        for hand, grant in zip(hands, grants, strict=True):
            if grant.micro_batches:
                assert hand.send(grant) == "accepted"
        self.reducer.advance()

    def finish(self, *hands: Hand) -> str:
        """The remaining rounds; the digest of the last version."""
        while (state := self.store.read()) and state.status == "running":
            self.round(*hands)
        self.reducer.close()
        return self.digest()

    def digest(self) -> str:
        state = self.store.read()
        assert state is not None
        return state.token.digest16


def forked(start: Callable[..., Job], parent: Job, version: int, with_state: bool, **changes: Any) -> Job:
    """A job that begins at a version of another, as the control plane hands it over, not opened yet."""
    child = start(**changes)
    child.reducer.close()
    child.store.purge()
    source = Artifacts(parent.root, parent.job_id)
    token = next(token for token in source.tokens() if token.version == version)
    shutil.rmtree(child.root)
    artifacts = Artifacts(child.root, child.job_id)
    origin = artifacts.adopt(source.path(token), source.manifest(token).sha256, with_state)
    child.store.publish(child.spec.model_dump_json(), str(origin))
    child.reducer = child.new_reducer()
    return child


@pytest.fixture
def start(redis: Redis, tmp_path: Path) -> Callable[..., Job]:
    """Makes jobs with a reducer; the fields are those of `spec_of`."""
    count = iter(range(100))

    def start(**changes: Any) -> Job:
        number = next(count)
        job_id = f"{tmp_path.name[-4:].replace('_', '0')}{number:04d}"
        RoundStore(redis, job_id).purge()
        return Job(redis, job_id, spec_of(**changes), tmp_path / str(number))

    return start
