"""The next version of a complete round: audit and combine the updates, step, compute the digest, begin to send it."""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from computeshare.codecs.messages import weights_parts
from computeshare.errors import Diverged
from computeshare.gossip.peers_mean import Newest, PeersMean
from computeshare.protocol.reducer_session import Link, ReducerSession
from computeshare.protocol.refusal import Received
from computeshare.protocol.round_store import RoundState
from computeshare.protocol.versions.chain import Chain
from computeshare.reducer.audits.comparison import Audits
from computeshare.reducer.drafts.round_draft import Drafts, RoundDraft
from computeshare.reducer.gather import RoundUpdates
from computeshare.reducer.job_setup import JobContext
from computeshare.reducer.recovery import staleness
from computeshare.runtime.failpoints import failpoint
from computeshare.strategies.averages import Spread
from computeshare.tensors.layout import Digest, Weights
from computeshare.types import Blob, Token, Vector

if TYPE_CHECKING:
    from computeshare.training.server_step import ServerModel


@dataclass(frozen=True, slots=True)
class Made:
    """A version that is ready to be committed."""

    model: "ServerModel"
    sha256: str
    left: Sequence[Blob | None]
    """The parts still to be sent; with a draft, None for those that it holds."""
    bytes: int
    """Of all parts, if versions are published as differences."""
    about: dict[str, Any]
    """Facts for the version's event, as `NextVersion.combine` returns them."""
    draft: str = ""
    """Name of the draft that it was."""


class Clock:
    """Seconds between laps, by name."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = round(now - self._last, 6)
        self._last = now


class NextVersion:
    """Turns one job's rounds into versions; a helper thread hashes and sends large weights meanwhile."""

    def __init__(self, job: JobContext, session: ReducerSession, helper: Executor) -> None:
        self.job, self._session, self._helper = job, session, helper
        suspects = job.spec.strategy.suspects
        self._audits = Audits(session, job.gatherer, suspects) if job.spec.audit else None
        about = session, job.layout, job.gatherer.codec, job.spec.strategy.recent, job.recovery.published
        self._peers = PeersMean(*about) if job.spec.strategy.averaging else None

    def make(
        self, base: RoundState, parts: dict[int, Received], samples: Sequence[int], model: "ServerModel", clock: Clock
    ) -> Made:
        """Combine a round's updates, take the optimizer's step, encode the version after `model`, and begin to send it.

        Args: as for `combine`.
        Raises: Refused: some updates were refused, and `model` is as it was; Diverged.
        """
        gradient, buffers, about = self.combine(base, parts, samples, model.published)
        failpoint("after_gather")
        clock.lap("combine")
        full, digest = self.step(base.version, model, gradient, buffers)
        del gradient
        clock.lap("step")
        server_step = self.job.server_step
        weights, following = server_step.publish(full, model.published, base.version + 1)
        del full
        size = sum(map(len, weights)) if server_step.chained else 0
        left, sha256 = self.begin_sending(weights, following.published, digest)
        clock.lap("encode")
        return Made(following, sha256, left, size, about)

    def finish(
        self,
        drafts: Drafts,
        draft: RoundDraft,
        base: RoundState,
        parts: dict[int, Received],
        clock: Clock,
    ) -> Made | None:
        """Complete a draft by the accepted updates of which it was made; None if one is invalid, and it was dropped.

        The helper computes the digest of the buckets that are made while the others are.
        Raises: Refused: some were refused; Altered: some are others than were read. The draft then does not count.
        """
        if self._audits:
            self._audits.check(base, parts)
        gatherer, layout, version = self.job.gatherer, self.job.layout, draft.version
        try:
            gatherer.confirm(base, parts, draft.digests)
        finally:
            gatherer.settle()
        count, hashed = len(layout.buckets), 0

        def hash_on() -> None:
            nonlocal hashed
            while count in draft.digests and hashed < count and hashed in draft.digests:
                self._helper.submit(version.digest.add, version.published(hashed))
                hashed += 1

        hash_on()
        if not drafts.complete(draft, parts, hash_on):
            return None
        failpoint("after_gather")
        clock.lap("combine")
        model = version.finish()
        clock.lap("step")
        sha256 = self._helper.submit(version.digest.hexdigest).result()
        clock.lap("encode")
        return Made(model, sha256, [None] * weights_parts(layout), draft.bytes, _staleness(base, parts), draft.name)

    def combine(
        self, base: RoundState, parts: dict[int, Received], samples: Sequence[int], published: Weights
    ) -> tuple[Vector, Vector, dict[str, Any]]:
        """Combine a round's updates.

        Args:
            parts: unit to its update; all of them count.
            samples: of each unit, ascending.
            published: the version from which the round started, as workers know it.
        Returns: the gradient (d,), the average of the updates' buffers (b,), and facts for the version's event:
            `staleness` if any is stale; where the strategy has peers the `consensus` distance, the root mean square,
            over parameters and peers, of the distance of their weights from the mean.
        Raises: Refused: some updates were refused; Diverged.
        """
        if self._audits:
            self._audits.check(base, parts)
        about = _staleness(base, parts)
        if self._peers:
            gradient, buffers, found = self._mean(
                self._peers.newest(base, parts, published.parameters), base, published
            )
            return gradient, buffers, about | found
        server_step = self.job.server_step
        updates = RoundUpdates(self.job.gatherer, base, parts, lambda: server_step.average(samples))
        try:
            gradient = server_step.combine(updates.read, samples, about.get("staleness", ()))
        finally:
            self.job.gatherer.settle()
        return gradient, updates.buffers.value, about

    def _mean(self, peers: Newest, base: RoundState, published: Weights) -> tuple[Vector, Vector, dict[str, Any]]:
        """As `combine`, of the peers' weights; if none are known, the version is as the one before."""
        server_step, plan, counts, absent = self.job.server_step, self.job.plan, peers.counts, peers.absent
        if not counts:
            return np.zeros_like(published.parameters), published.buffers, {}
        samples = [plan.unit_size(unit) for unit in sorted(peers.parts)]
        samples += [plan.unit_size(0) * absent.count] * bool(absent.count)
        updates = RoundUpdates(
            self.job.gatherer, base, peers.parts, lambda: server_step.average(samples), peers.offsets
        )
        spread, buckets = Spread(absent.square), self.job.layout.buckets

        def read(bucket: int) -> Iterator[Vector]:
            return spread.of(absent.after(updates.read(bucket), buckets[bucket]), counts)

        try:
            gradient = server_step.combine(read, samples)
        finally:
            self.job.gatherer.settle()
        if absent.count:
            updates.buffers.add(absent.buffers, samples[-1])
        values = sum(counts) * len(published.parameters)
        return gradient, updates.buffers.value, {"consensus": math.sqrt(spread.square / values)}

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

    def link(self, chain: Chain, token: Token, made: Made) -> Link | None:
        """Add a version to the chain of differences; None if versions are published whole."""
        server_step = self.job.server_step
        if not server_step.chained:
            return None
        chain.add(token, made.bytes)
        if not chain.wants_snapshot:
            return Link()
        outdated = chain.outdated
        whole = server_step.publish_whole(made.model)[0]
        chain.renew(token, sum(map(len, whole)))
        return Link(whole, len(chain.tokens) - 1, outdated)


def _staleness(base: RoundState, parts: Mapping[int, Received]) -> dict[str, Any]:
    """For the version's event: `staleness`, by unit in ascending order, if any update is stale."""
    ages = [staleness(parts[m].base, base.token) for m in sorted(parts)]
    return {"staleness": ages} if any(ages) else {}
