"""From a full round to the next version: combine the updates, step, compute the digest, and send the weights on."""

from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING

import numpy as np

from computeshare.errors import Diverged
from computeshare.protocol.reducer_session import Claim, Link, Received
from computeshare.protocol.round_store import RoundState
from computeshare.protocol.version_chain import Chain
from computeshare.reducer.gather import RoundUpdates
from computeshare.reducer.job_setup import JobContext
from computeshare.reducer.recovery import behind
from computeshare.tensors.layout import Digest, Weights
from computeshare.types import Blob, Token, Vector

if TYPE_CHECKING:
    from computeshare.training.server_step import Held


class VersionStep:
    """One job's step from version to version; large weights are hashed and sent in a thread beside it."""

    def __init__(self, job: JobContext, rounds: Claim, helper: Executor) -> None:
        self.job, self._rounds, self._helper = job, rounds, helper

    def combine(
        self, base: RoundState, parts: dict[int, Received], samples: Sequence[int]
    ) -> tuple[Vector, Vector, list[int]]:
        """Combine a round's updates.

        Args:
            parts: unit to its update; all of them count.
            samples: of each unit, ascending.
        Returns: the gradient (d,), the mean of the updates' buffers (b,), and each update's staleness in versions.
        Raises: Refused: some updates were refused; Diverged.
        """
        staleness = [behind(parts[m].base, base.token) for m in sorted(parts)]
        updates = RoundUpdates(self.job.gatherer, base, parts, sum(samples))
        try:
            gradient = self.job.steps.combine(updates.read, samples, staleness)
        finally:
            self.job.gatherer.settle()
        return gradient, updates.buffers.value, staleness

    def step(
        self, version: int, held: "Held", gradient: Vector, buffers: Vector
    ) -> tuple[Weights, "Future[str] | None"]:
        """Compute the full-precision weights of the version after `version`, whose weights are `held`.

        Their digest is computed bucket by bucket beside the step, where the weights have several buckets and workers
        get them as they are; else None. Raises Diverged: the step produced NaN or infinity.
        """
        layout, steps = self.job.layout, self.job.steps
        others = steps.others(buffers, held.weights)
        digest = Digest(layout, *others) if steps.is_exact and len(layout.buckets) > 1 else None

        def ready(parameters: Vector) -> None:
            if not np.isfinite(parameters).all():
                raise Diverged(f"Training diverged at version {version}: the step produced NaN or infinity")
            if digest:
                self._helper.submit(digest.add, parameters)

        master = steps.move(held, gradient, ready)
        return Weights(master, *others), self._helper.submit(digest.hexdigest) if digest else None

    def begin(
        self, parts: Iterable[Blob], weights: Weights, digest: "Future[str] | None"
    ) -> tuple[Sequence[Blob], str]:
        """Begin to send the next version's weights, if they are large, while their digest is computed.

        Returns: what is left to send, and the digest.
        """
        layout = self.job.layout
        if len(layout.buckets) == 1:
            return [*parts], layout.digest(weights)
        digest = digest or self._helper.submit(layout.digest, weights)
        return self._rounds.begin(parts), digest.result()

    def link(self, chain: Chain, token: Token, held: "Held", delta: Iterable[Blob]) -> Link | None:
        """Add a version that is published as a difference to its chain; None: versions are published whole."""
        steps = self.job.steps
        if not steps.chained:
            return None
        chain.add(token, sum(map(len, delta)))
        if not chain.wants_snapshot:
            return Link()
        outdated = chain.outdated
        whole = steps.blob(held.master, held.weights)[0]
        chain.renew(token, sum(map(len, whole)))
        return Link(whole, len(chain.tokens) - 1, outdated)
