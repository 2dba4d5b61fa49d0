"""The next version of a complete round: audit and combine the updates, step, compute the digest, begin to send it."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog

from computeshare.errors import Diverged
from computeshare.protocol.reducer_session import Link, ReducerSession
from computeshare.protocol.refusal import AuditRecords, Received
from computeshare.protocol.round_store import RoundState
from computeshare.protocol.versions.chain import Chain
from computeshare.reducer.drafts.round_draft import RoundDraft
from computeshare.reducer.gather import Gatherer, Refused, RoundUpdates
from computeshare.reducer.job_setup import JobContext
from computeshare.reducer.recovery import staleness
from computeshare.runtime.failpoints import failpoint
from computeshare.strategies.averages import Spread
from computeshare.tensors.layout import Digest, Weights
from computeshare.types import Blob, Token, Vector, machine_of

if TYPE_CHECKING:
    from computeshare.training.server_step import ServerModel

log = structlog.get_logger()


class Audits:
    """Compares updates with the copies that a second machine of the same kind computed, before they count.

    The same kind computes the same bits, so any difference is a lie or a fault. A third machine computes the unit
    again: whoever of the two sent something else is banned, and its updates of the round are refused.
    """

    def __init__(self, session: ReducerSession, gatherer: Gatherer) -> None:
        self._session, self._gatherer = session, gatherer

    def check(self, base: RoundState, parts: Mapping[int, Received]) -> None:
        """Compare what can be compared. Raises Refused: some units were taken back."""
        records = self._session.audits()
        done = [
            self._decide(base, parts, unit, parties, records)
            for unit, parties in records.disputes.items()
            if unit in parts
        ]
        done += [
            self._compare(base, parts[unit], copy, records)
            for unit, copy in records.copies.items()
            if unit in parts and unit not in records.disputes
        ]
        if not all(done):
            raise Refused

    def _compare(self, base: RoundState, part: Received, copy: Received, records: AuditRecords) -> bool:
        """Compare an update with its copy; False: they differ, and the unit was taken back."""
        kind, token, unit = records.kinds.get(part.worker), base.token, part.micro_batch
        workers = [part.worker, copy.worker]
        machines = {machine_of(part.worker), machine_of(copy.worker)}
        if kind is None or kind != records.kinds.get(copy.worker) or len(machines) < 2:
            self._session.close_audit(token, unit)
            self._tell(base, unit, "skipped", workers)
            return True
        sent = {part.worker: self._gatherer.digest((part.base, unit))}
        sent[copy.worker] = self._gatherer.digest((copy.base, f"{unit}:copy"))
        digests = {worker: digest for worker, digest in sent.items() if digest is not None}
        others = {machine_of(worker) for worker in records.present if records.kinds.get(worker) == kind} - machines
        if len(digests) == 2 and len({*digests.values()}) == 2 and others:
            return not self._session.dispute(token, part, digests)
        self._session.close_audit(token, unit)
        outcome = "confirmed" if len({*digests.values()}) == 1 else "undecided"
        self._tell(base, unit, outcome if len(digests) == 2 else "skipped", workers)
        return True

    def _decide(
        self,
        base: RoundState,
        parts: Mapping[int, Received],
        unit: int,
        parties: Mapping[str, str],
        records: AuditRecords,
    ) -> bool:
        """Decide a dispute by a third machine's update; False: updates of whoever was wrong were refused."""
        third = parts[unit].worker
        digest = self._gatherer.digest((parts[unit].base, unit))
        right = [worker for worker, sent in parties.items() if sent == digest]
        self._session.close_audit(base.token, unit)
        is_third = machine_of(third) not in {machine_of(worker) for worker in parties}
        is_third = is_third and records.kinds.get(third) in {records.kinds.get(worker) for worker in parties}
        if not is_third or len(right) != 1:
            self._tell(base, unit, "undecided", [*parties])
            return True
        (wrong,) = parties.keys() - {*right}
        self._tell(base, unit, "mismatched", [wrong, *right, third])
        reason = f"audit: its update for micro-batch {unit}, version {base.version}, was not what two machines computed"
        for worker in {wrong} | {one for one in records.present if machine_of(one) == machine_of(wrong)}:
            self._session.ban(base.token, worker, reason)
        bad = [part for part in parts.values() if machine_of(part.worker) == machine_of(wrong)]
        for part in bad:
            self._session.refuse(base.token, part, reason, "damaged")
        return not bad

    def _tell(self, base: RoundState, unit: int, outcome: str, workers: Sequence[str]) -> None:
        about = {"version": base.version, "micro_batch": unit, "outcome": outcome, "workers": workers}
        self._session.announce("audited", about)
        if outcome in ("mismatched", "undecided"):
            log.warning("audited", job=self._session.job_id, **about)


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
        self._audits = Audits(session, job.gatherer) if job.spec.audit else None
        self._references: dict[str, Vector] = {}
        """Where the strategy has peers: token to the parameters of the recent versions."""

    def make(
        self, base: RoundState, parts: dict[int, Received], samples: Sequence[int], model: "ServerModel", clock: Clock
    ) -> Made:
        """Combine a round's updates, take the optimizer's step, encode the version after `model`, and begin to send it.

        Args: as for `combine`.
        Raises: Refused: some updates were refused, and `model` is as it was; Diverged.
        """
        gradient, buffers, about = self.combine(base, parts, samples, model.published.parameters)
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
        self, draft: RoundDraft, base: RoundState, parts: dict[int, Received], samples: Sequence[int], clock: Clock
    ) -> Made:
        """Complete a draft, all of whose buckets are made, by the accepted updates of which it was made.

        Raises: Refused: some were refused; Altered: some are others than were read. The draft then does not count.
        """
        if self._audits:
            self._audits.check(base, parts)
        gatherer, count = self.job.gatherer, len(self.job.layout.buckets)
        buffers = self.job.server_step.average(samples)
        try:
            gatherer.confirm(base, parts, [draft.digests[bucket] for bucket in range(count)], buffers)
        finally:
            gatherer.settle()
        failpoint("after_gather")
        clock.lap("combine")
        rest, model = draft.version.finish(buffers.value)
        clock.lap("step")
        left: list[Blob | None] = [None] * count
        size, sha256 = draft.bytes + sum(map(len, rest)), self.job.layout.digest(model.published)
        clock.lap("encode")
        return Made(model, sha256, [*left, *rest], size, {}, draft.name)

    def combine(
        self, base: RoundState, parts: dict[int, Received], samples: Sequence[int], parameters: Vector
    ) -> tuple[Vector, Vector, dict[str, Any]]:
        """Combine a round's updates.

        Args:
            parts: unit to its update; all of them count.
            samples: of each unit, ascending.
            parameters: of the version from which the round started, as workers know them.
        Returns: the gradient (d,), the average of the updates' buffers (b,), and facts for the version's event:
            `staleness` if any is stale; where the strategy has peers the `consensus` distance, the root mean square,
            over parameters and peers, of the distance of their weights from the mean.
        Raises: Refused: some updates were refused; Diverged.
        """
        if self._audits:
            self._audits.check(base, parts)
        ages = [staleness(parts[m].base, base.token) for m in sorted(parts)]
        about: dict[str, Any] = {"staleness": ages} if any(ages) else {}
        server_step, offsets = self.job.server_step, dict[int, Vector]()
        spread = Spread() if self.job.spec.strategy.averaging else None
        if spread:
            parts, offsets = self._newest_of_peers(base, parts, parameters)
            samples, ages = [self.job.plan.unit_size(unit) for unit in sorted(parts)], []
        updates = RoundUpdates(self.job.gatherer, base, parts, lambda: server_step.average(samples), offsets)
        read = (lambda bucket: spread.of(updates.read(bucket))) if spread else updates.read
        try:
            gradient = server_step.combine(read, samples, ages)
        finally:
            self.job.gatherer.settle()
        if spread:
            about["consensus"] = math.sqrt(spread.square / (len(parts) * len(parameters)))
        return gradient, updates.buffers.value, about

    def _newest_of_peers(
        self, base: RoundState, parts: dict[int, Received], parameters: Vector
    ) -> tuple[dict[int, Received], dict[int, Vector]]:
        """Where the strategy has peers: the newest update of each, by unit, and the vectors (d,) that make those on an
        earlier reference differences from `parameters`.

        A peer whose reference this reducer has not had, because it took over since, is left out.
        """
        references = self._recent_references(base, parameters)
        newest = {part.worker: part for part in sorted(parts.values(), key=lambda part: part.at)}.values()
        chosen = {part.micro_batch: part for part in newest if part.base in references} or parts
        earlier = {part.base for part in chosen.values()} & references.keys() - {str(base.token)}
        offsets = {token: parameters - references[token] for token in earlier}
        return chosen, {unit: offsets[part.base] for unit, part in chosen.items() if part.base in offsets}

    def _recent_references(self, base: RoundState, parameters: Vector) -> dict[str, Vector]:
        """The parameters of the recent versions, now with those of `base`."""
        self._references[str(base.token)] = parameters.copy()  # the step overwrites them
        for outdated in [*self._references][: -self.job.spec.strategy.recent]:
            del self._references[outdated]
        return self._references

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
