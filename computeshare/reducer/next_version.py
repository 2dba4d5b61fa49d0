"""The next version of a complete round: combine the updates, step, compute the digest, begin to send the weights."""

from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING

import numpy as np

from computeshare.errors import Diverged
from computeshare.protocol.reducer_session import Link, ReducerSession
from computeshare.protocol.refusal import Received
from computeshare.protocol.round_store import RoundState
from computeshare.protocol.versions.chain import Chain
from computeshare.reducer.gather import RoundUpdates
from computeshare.reducer.job_setup import JobContext
from computeshare.reducer.recovery import staleness
from computeshare.tensors.layout import Digest, Weights
from computeshare.types import Blob, Token, Vector

if TYPE_CHECKING:
    from computeshare.training.server_step import ServerModel


class NextVersion:
    """Turns one job's rounds into versions; a helper thread hashes and sends large weights meanwhile."""

    def __init__(self, job: JobContext, session: ReducerSession, helper: Executor) -> None:
        self.job, self._session, self._helper = job, session, helper

    def combine(
        self, base: RoundState, parts: dict[int, Received], samples: Sequence[int]
    ) -> tuple[Vector, Vector, list[int]]:
        """Combine a round's updates.

        Args:
            parts: unit to its update; all of them count.
            samples: of each unit, ascending.
        Returns: the gradient (d,), the average of the updates' buffers (b,), and each update's staleness in versions.
        Raises: Refused: some updates were refused; Diverged.
        """
        ages = [staleness(parts[m].base, base.token) for m in sorted(parts)]
        server_step = self.job.server_step
        updates = RoundUpdates(self.job.gatherer, base, parts, lambda: server_step.average(samples))
        try:
            gradient = server_step.combine(updates.read, samples, ages)
        finally:
            self.job.gatherer.settle()
        return gradient, updates.buffers.value, ages

    def step(
        self, version: int, model: "ServerModel", gradient: Vector, buffers: Vector
    ) -> tuple[Weights, "Future[str] | None"]:
        """Compute the full-precision weights of the version after `version`, which is `model`.

        Returns: the weights, and their digest, which the helper computes bucket by bucket during the step; None if
        there is a single bucket or the codec down is lossy (the digest is of the published weights).
        Raises: Diverged: the step produced NaN or infinity.
        """
        layout, server_step = self.job.layout, self.job.server_step
        others = server_step.next_buffers(buffers, model.published)
        digest = Digest(layout, *others) if server_step.is_exact and len(layout.buckets) > 1 else None

        def ready(parameters: Vector) -> None:
            if not np.isfinite(parameters).all():
                raise Diverged(f"Training diverged at version {version}: the step produced NaN or infinity")
            if digest:
                self._helper.submit(digest.add, parameters)

        master = server_step.next_parameters(version + 1, model, gradient, ready)
        return Weights(master, *others), self._helper.submit(digest.hexdigest) if digest else None

    def begin_sending(
        self, parts: Iterable[Blob], weights: Weights, digest: "Future[str] | None"
    ) -> tuple[Sequence[Blob], str]:
        """Begin to send the next version's weights, if they have several buckets, while their digest is computed.

        Args:
            parts: the encoded weights.
        Returns: the parts left to send, and the digest of `weights`.
        """
        layout = self.job.layout
        if len(layout.buckets) == 1:
            return [*parts], layout.digest(weights)
        digest = digest or self._helper.submit(layout.digest, weights)
        return self._session.begin(parts), digest.result()

    def link(self, chain: Chain, token: Token, model: "ServerModel", delta: Iterable[Blob]) -> Link | None:
        """Add a version to the chain of differences; None if versions are published whole."""
        server_step = self.job.server_step
        if not server_step.chained:
            return None
        chain.add(token, sum(map(len, delta)))
        if not chain.wants_snapshot:
            return Link()
        outdated = chain.outdated
        whole = server_step.publish_whole(model)[0]
        chain.renew(token, sum(map(len, whole)))
        return Link(whole, len(chain.tokens) - 1, outdated)
