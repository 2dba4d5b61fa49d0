"""Workers moved by hand that send an update bucket by bucket, and offer each bucket to the reducer."""

import uuid
from pathlib import Path
from typing import Any

import torch

from computeshare.codecs.messages import encode_update
from computeshare.protocol.worker_session import Grant
from computeshare.tasks.registry import task_of
from computeshare.training.local_replica import LocalReplica
from computeshare.types import Blob
from computeshare.worker.seat.weights_receiver import WeightsReceiver
from tests.support.job_reducer import Hand, Job


class Follower(Hand):
    """A hand that keeps the last weights, as workers do where versions are published as differences."""

    def __init__(self, *about: Any) -> None:
        super().__init__(*about)
        if inner := self.spec.strategy.inner:
            instance = task_of(self.spec).instance(self.spec.seed, "train", Path())
            self.replica = LocalReplica(instance, self.spec.plan, torch.device("cpu"), inner)
        self.inbox = WeightsReceiver(self.session, self.spec.codecs.down, self.layout)

    def pull(self) -> Grant:
        """Load the current version and lease a share of its round."""
        weights, grant = self.inbox.pull(self.session.lease("").token)
        assert weights is not None and self.inbox.is_right()
        self.replica.load(weights)
        return grant


def follow(job: Job, worker: str) -> Follower:
    return Follower(job.redis, job.job_id, job.spec, worker)


class Sending:
    """A grant's updates on their way."""

    def __init__(self, hand: Hand, grant: Grant) -> None:
        self.session, self.token, self.nonce = hand.session, grant.token, uuid.uuid4().hex
        self.messages, self.losses = dict[int, list[Blob]](), dict[int, float]()
        self.staged: set[tuple[int, int]] = set()
        for m in grant.micro_batches:
            update, seed = hand.replica.compute(m), hand.spec.plan.generator_seed(m)
            self.messages[m] = encode_update(hand.up, update.vector, update.buffers, hand.layout, seed)
            self.losses[m] = update.loss

    def offer(self, *buckets: int) -> None:
        """Stage these buckets of all units, and tell the reducer."""
        for m in self.messages:
            self.session.stage(self.nonce, m, {one: self.messages[m][one] for one in buckets}, self.token)
            self.staged |= {(m, one) for one in buckets}

    def submit(self) -> str:
        """Submit the updates, without what is staged."""
        updates = [
            (m, [None if (m, i) in self.staged else part for i, part in enumerate(parts)], self.losses[m])
            for m, parts in self.messages.items()
        ]
        return self.session.submit(self.token, self.nonce, updates, {}).outcome


def leased(*hands: Follower) -> list[Sending]:
    """The updates of all units of a round, by these hands."""
    grants = [(hand, hand.pull()) for hand in hands]
    while sum(len(grant.micro_batches) for _, grant in grants) < hands[0].spec.plan.units_per_round:
        grants += [(hand, hand.session.lease(grants[0][1].token)) for hand in hands]
    return [Sending(hand, grant) for hand, grant in grants if grant.micro_batches]
