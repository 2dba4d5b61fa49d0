"""A round's draft: buckets of the next version, made and published as soon as every update of the round has them."""

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog
from redis.exceptions import OutOfMemoryError, RedisError

from computeshare.errors import CodecError, LostClaim
from computeshare.protocol.reducer_session import ReducerSession, StagedOffer
from computeshare.protocol.refusal import Received
from computeshare.protocol.round_store import RoundState
from computeshare.reducer.job_setup import JobContext
from computeshare.runtime.failpoints import failpoint
from computeshare.types import Token, Vector

if TYPE_CHECKING:
    from computeshare.training.server_step import ServerModel, VersionDraft

log = structlog.get_logger()

KEPT_S = 30.0
"""Seconds after which a draft's life in the broker is extended."""
Sources = Mapping[int, Received | StagedOffer]
"""Unit to its update, accepted or only staged."""


class Missing(Exception):
    """A part is not there any more."""


@dataclass(slots=True)
class RoundDraft:
    """The next version of the round that starts from `base`, as far as it is made of the submissions `nonces`, by unit.

    It counts only if those submissions are accepted, with the bytes that were read.
    """

    base: Token
    nonces: Mapping[int, str]
    version: "VersionDraft"
    name: str = field(default_factory=lambda: secrets.token_hex(16))
    digests: dict[int, dict[int, bytes]] = field(default_factory=dict)
    """For each part made, a bucket or after the last one the buffers: unit to the digest of its update's frame."""
    bytes: int = 0
    """Of the version's frames."""
    kept_at: float = field(default_factory=time.monotonic)

    def is_of(self, base: Token, units: Mapping[int, Received | StagedOffer]) -> bool:
        """Whether it is made of these updates of the round that starts from `base`, and of no others."""
        return base == self.base and {unit: one.nonce for unit, one in units.items()} == self.nonces


class Drafts:
    """Makes one job's drafts, one at a time."""

    def __init__(self, job: JobContext, session: ReducerSession) -> None:
        self._job, self._session = job, session
        self._draft: RoundDraft | None = None
        self._failed: Token | None = None
        """The version whose round gets no other draft."""

    def go_on(self, base: RoundState, model: "ServerModel", received: Mapping[int, Received]) -> None:
        """Make the buckets that every update of the open round has by now, and publish them.

        Raises LostClaim: the version or the fence had moved on.
        """
        if not self._job.has_drafts or base.token == self._failed:
            return
        try:
            offers = self._session.offers() if base.status == "running" else {}
            sources: Sources = {**offers, **received}
            if base.status != "running" or not self._may_count(base, sources):
                self.drop()
            if offers:
                self._draft_more(base, model, sources)
            self._keep()
        except (CodecError, FloatingPointError, RedisError) as error:
            # what is invalid is refused if it is submitted; if the broker is away or has no room, the next look says so
            self._fail(base.token, error)

    def take(self, base: RoundState, parts: Mapping[int, Received]) -> RoundDraft | None:
        """The draft, if it is made of exactly these accepted updates; another is dropped."""
        draft = self._draft
        if draft and not draft.is_of(base.token, parts):
            self.drop()
        return self._draft

    def complete(self, draft: RoundDraft, parts: Mapping[int, Received], made: Callable[[], object]) -> bool:
        """Make the parts that are left, from accepted updates, in the order of the version's digest, and call `made`
        after each; False if one is invalid, and the draft was dropped.
        """
        buffers, *buckets = self._parts
        try:
            for part in buffers, *reversed(buckets):
                if part not in draft.digests:
                    self._make(draft, parts, part)
                    made()
        except (Missing, CodecError, FloatingPointError, OutOfMemoryError) as error:
            self._fail(draft.base, error)
        return self._draft is not None

    def forget(self) -> None:
        """Forget the draft, which was committed."""
        self._draft = None

    def drop(self) -> None:
        """Delete the draft, which will not be committed."""
        if self._draft:
            self._session.drop_draft(self._draft.name)
        self._draft = None

    def _may_count(self, base: RoundState, sources: Sources) -> bool:
        """Whether nothing that was accepted or offered so far contradicts the draft: another worker may have offered
        the update of one that died.
        """
        draft = self._draft
        if draft is None:
            return True
        return base.token == draft.base and all(draft.nonces.get(m) == one.nonce for m, one in sources.items())

    def _keep(self) -> None:
        """Keep the draft from expiring."""
        if self._draft and time.monotonic() - self._draft.kept_at > KEPT_S:
            self._session.keep_draft(self._draft.name)
            self._draft.kept_at = time.monotonic()

    def _begin(self, base: RoundState, model: "ServerModel", sources: Sources) -> RoundDraft:
        samples = [self._job.plan.unit_size(unit) for unit in sorted(sources)]
        version = self._job.server_step.draft(model, base.version + 1, samples)
        nonces = {unit: one.nonce for unit, one in sources.items()}
        return RoundDraft(base.token, nonces, version)

    @property
    def _parts(self) -> Sequence[int]:
        """The parts of an update as workers send them: the buffers, then the buckets, last first."""
        return range(len(self._job.layout.buckets), -1, -1)

    def _draft_more(self, base: RoundState, model: "ServerModel", sources: Sources) -> None:
        if self._draft is None and sorted(sources) == base.units:
            self._draft = self._begin(base, model, sources)
        draft = self._draft
        if draft is None or not draft.is_of(base.token, sources):
            return
        offers = [one for one in sources.values() if isinstance(one, StagedOffer)]
        with contextlib.suppress(Missing):  # submitted meanwhile, or taken back
            for part in self._parts:
                if part not in draft.digests and all(part in offer.parts for offer in offers):
                    self._make(draft, sources, part)

    def _fail(self, base: Token, error: Exception) -> None:
        """Drop the draft, and make no other in this round."""
        log.info("draft given up", job=self._session.job_id, version=base.version, error=str(error))
        self._failed = base
        with contextlib.suppress(RedisError):
            self.drop()
        self._draft = None

    def _make(self, draft: RoundDraft, sources: Sources, part: int) -> None:
        """Make a part and publish it. Raises as `_read`, FloatingPointError, LostClaim."""
        digests: dict[int, bytes] = {}
        updates = self._read(sources, part, digests)
        if part < len(self._job.layout.buckets):
            frames = [draft.version.add(part, updates)]
        else:
            frames = draft.version.settle(updates)
        for index, frame in enumerate(frames, part):
            if not self._session.draft(draft.base, draft.name, index, frame):
                raise LostClaim(f"version {draft.base} was reduced by another, or the job ended")
        draft.digests[part] = digests
        draft.bytes += sum(map(len, frames))
        failpoint("after_draft")

    def _read(self, sources: Sources, part: int, digests: dict[int, bytes]) -> Iterator[Vector]:
        """Yield a part of each update, in the order of units, and note the digests of the frames.

        Raises: Missing, CodecError: one is not there, or invalid.
        """
        for unit in sorted(sources):
            found = self._job.gatherer.early(unit, sources[unit], part)
            if found is None:
                raise Missing
            values, digests[unit] = found
            yield values
