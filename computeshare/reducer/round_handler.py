"""A job's rounds: open or resume them, then check each complete round, combine, step, commit, save."""

import dataclasses
import struct
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any, Literal

import structlog

from computeshare.checkpoints.store import Artifacts
from computeshare.codecs.messages import is_news, update_parts
from computeshare.errors import ArtifactError, CodecError, DamagedRound, LostClaim, ShapeError
from computeshare.jobspec.quorum import RoundProgress, deadline_ms, decide, needed
from computeshare.jobspec.sampling_plan import Round
from computeshare.protocol.reducer_session import ReducerSession
from computeshare.protocol.refusal import Received
from computeshare.protocol.round_store import RoundState
from computeshare.protocol.versions.chain import Chain
from computeshare.reducer.checkpointer import Checkpointer, Snapshot
from computeshare.reducer.drafts.round_draft import Drafts
from computeshare.reducer.gather import Altered, Refused
from computeshare.reducer.job_setup import JobContext
from computeshare.reducer.next_version import Clock, NextVersion
from computeshare.reducer.recovery import LoadedVersion, StoredState, damage
from computeshare.runtime.durability import Disk
from computeshare.runtime.failpoints import armed, failpoint
from computeshare.runtime.log_lines import REMARK_EVERY_S, Seldom
from computeshare.runtime.processes import return_freed_memory
from computeshare.types import Blob, Message, Token

log = structlog.get_logger()

ROUND_POLL_S = 0.25
"""Longest time between looks at a round, in seconds: its deadline may close it without all of its micro-batches."""
UNUSABLE = (DamagedRound, LostClaim, ValueError, ArtifactError, CodecError, ShapeError, struct.error)
"""Errors that mean: the broker's data are too damaged to resume the round."""
DISK_CHECK_S = 1.0
"""Seconds between checks that the disk has room for a checkpoint."""
Outcome = Literal["wait", "look again", "over"]


class RoundHandler:
    """Opens or resumes one job's rounds, and reduces each to the next version."""

    def __init__(
        self,
        job: JobContext,
        session: ReducerSession,
        artifacts: Artifacts,
        checkpoints: Checkpointer,
        helper: Executor,
    ) -> None:
        self.job, self.session, self.artifacts, self.checkpoints = job, session, artifacts, checkpoints
        self.current: LoadedVersion | None = None
        """None before the job is opened or resumed, and after a failed step, which has overwritten the weights."""
        self.look_again_s = ROUND_POLL_S
        """Longest wait before the next look at the round, in seconds."""
        self.expected: list[tuple[str, int]] = []
        """Updates of the current round (base token, unit) that are read in the exchange that finds them."""
        self.update_parts = update_parts(job.layout)
        self._total = job.spec.rounds_total
        self._next_version = NextVersion(job, session, helper)
        self._drafts = Drafts(job, session)
        self._chain = Chain([], Token(0, 0, ""), 0)
        self._stored = StoredState(Token(0, 0, ""))
        self._planned: Round | None = None
        """The newest round computed from the plan."""
        self._deadline = Token(0, 0, ""), 0.0
        """Of the round that starts from this version, in milliseconds; see `RoundProgress`."""
        self._disk_checked_s = 0.0
        self._remarks = Seldom(REMARK_EVERY_S)

    # Opening and resuming

    def open(self) -> None:
        """Publish version 0, or the last checkpoint under a new incarnation if the broker lost the job."""
        job = self.job
        restored = job.recovery.on_disk()
        if restored is None and self.session.origin():
            raise ArtifactError("the weights that this job was forked from are missing or damaged: fork again")
        manifest = self.artifacts.manifest(restored.token) if restored else None
        carried = manifest.carried if manifest else ()
        if not self.session.is_newest():  # a record of an opening ends the incarnation before
            raise LostClaim("another reducer has taken over")
        incarnation = self.artifacts.next_incarnation(restored.token if restored else None)
        version = restored.token.version if restored else 0
        loaded = restored.model if restored else job.recovery.initial()
        blob, model = job.server_step.publish_whole(loaded)
        sha256 = job.layout.digest(model.published)
        token = Token(incarnation, version, sha256[:16])
        next_round = self._next_round(version, carried)
        if manifest and next_round.wanted is not None:
            next_round = dataclasses.replace(next_round.behind(manifest.next_micro_batch), carried=carried)
        event: dict[str, Any] = {"token": str(token), "version": version, "incarnation": incarnation}
        event |= {"sha256": sha256, "bytes": sum(map(len, blob))}
        event |= {"restored": restored is not None and restored.token.incarnation > 0}  # else it is a fork's beginning
        event |= {"parameters": job.layout.parameters, "kind": job.kind}
        state = job.server_step.dump(model.master)
        before = self._before(token, restored)
        if not self.session.open(token, blob, state, next_round, event, job.spec.strategy.recent, job.terms, before):
            self.artifacts.withdraw(incarnation)
            raise LostClaim("the job was opened by another reducer")
        return_freed_memory()
        self.current, self._stored = LoadedVersion(token, model, sha256), StoredState(token)
        self._chain = Chain([before[0], token] if before else [token], token, sum(map(len, blob)))
        about = {"version": version, "from_checkpoint": restored is not None, "parameters": job.layout.parameters}
        log.info("opened", job=self.session.job_id, **about)

    def _before(self, token: Token, restored: LoadedVersion | None) -> tuple[Token, list[Blob]] | None:
        """The version before the restored one, which is opened as `token`, with its encoded weights, if the round's
        units are computed on it. Raises ArtifactError: the checkpoint lacks it.
        """
        job = self.job
        if not job.spec.strategy.lag or restored is None or not 0 < token.version < self._total:
            return None
        if restored.before is None:
            raise ArtifactError(f"checkpoint {restored.token} lacks the version before, on which its round is computed")
        digest16 = job.layout.digest(restored.before)[:16]
        earlier = Token(token.incarnation, token.version - 1, digest16)
        return earlier, job.server_step.encode_published(restored.before)

    def resume(self, state: RoundState) -> None:
        """Take over the running round `state` from the broker. Raises one of UNUSABLE."""
        self._check(state)
        self.current, self._chain = self.job.recovery.in_broker(state)
        self._stored = StoredState(state.token)
        log.info("took over", job=self.session.job_id, version=state.version)

    def save_if_wanted(self, state: RoundState) -> None:
        """Write the current version's checkpoint if the job wants it: the last reducer may have died too early."""
        assert self.current is not None
        if self.job.spec.wants_checkpoint(state.version):
            self._checkpoint(self.current, self._next_round(state.version, state.carried), state.base)

    # Each round

    def handle(self, state: RoundState, parts: dict[int, Received], ahead: dict[tuple[str, int], Message]) -> Outcome:
        """Do the work that the round `state` needs now.

        Args:
            parts: unit to its received update.
            ahead: messages read already, by base token and unit.
        Raises: DamagedRound: the round cannot be of this job; LostClaim.
        """
        if self.current is None or self.current.token != state.token:
            raise LostClaim(f"version {state.token} was committed by another reducer")
        self._check(state)
        if state.status == "finished":
            self._save_last(self.current)
            return "over"
        self.checkpoints.notice()
        if self.checkpoints.is_stuck and state.status == "running":
            self._retry_checkpoint(state, self.current)
        if state.doubted == state.token:
            self._republish(state, self.current)
        elif state.doubted:
            raise DamagedRound(f"the weights of version {state.doubted} are damaged, and the round is computed on them")
        if self.checkpoints.is_stuck:
            return "wait"  # until a user resumes the job
        if len(parts) >= state.needed or state.closed:
            self.job.gatherer.ahead = ahead
            self._reduce(state, self.current, _earliest(parts, state.needed))
        elif self._close_if_due(state, len(parts)):
            return "look again"
        else:
            self._drafts.go_on(state, self.current.model, parts)
        return "wait"

    def _check(self, state: RoundState) -> None:
        """Raises DamagedRound: the round cannot be of this job."""
        planned = self._planned
        if planned is None or (planned.version, planned.carried) != (state.version, state.carried):
            planned = self._planned = self.job.spec.round_from(state.version, state.carried)
        if why := damage(state, planned, self._total):
            raise DamagedRound(why)

    def _close_if_due(self, state: RoundState, received: int) -> bool:
        """Close the round without the late updates if its deadline has passed and enough have arrived."""
        quorum = self.job.spec.quorum_of(state.version)
        self.look_again_s = ROUND_POLL_S
        if quorum == 1:
            return False
        waited_ms = self.session.now_ms() - state.opened_ms
        if self._deadline[0] != state.token:
            before = self.session.arrivals()[received:]  # the newest are this round's
            self._deadline = state.token, deadline_ms(before)
        decision = decide(RoundProgress(received, state.total, waited_ms, self._deadline[1]), quorum)
        if decision.ask_again_ms is not None:
            self.look_again_s = min(ROUND_POLL_S, max(0.005, decision.ask_again_ms / 1000))
        closed = decision.close and self.session.close(state.token, needed(state.total, quorum))
        if closed:
            about = {"job": self.session.job_id, "token": str(state.token), "reason": decision.reason}
            self._remarks.tell(log.info, "closed", **about)
        return closed

    def _reduce(self, base: RoundState, current: LoadedVersion, parts: dict[int, Received]) -> None:
        """Turn a complete round into the next version: combine, step, send, commit. Workers compute the next round
        while a large state is stored, if it is (`JobContext.kept_bytes`).
        """
        job, clock = self.job, Clock()
        counted = [parts[m] for m in sorted(parts)]
        samples = [job.plan.unit_size(part.micro_batch) for part in counted]
        draft, made = self._drafts.take(base, parts), None
        self.current = None  # the step overwrites its weights: after a failure, load the version from Redis again
        try:
            if draft:
                made = self._next_version.finish(self._drafts, draft, base, parts, clock)
            made = made or self._next_version.make(base, parts, samples, current.model, clock)
        except (Refused, Altered):
            self._drafts.drop()
            self.current = current
            return
        model, sha256 = made.model, made.sha256
        del current, draft
        token = Token(base.token.incarnation, base.version + 1, sha256[:16])
        event = self._event(base, token, sha256, counted, samples) | made.about
        next_round = self._next_round(token.version, tuple(m for m in base.units if m not in parts), base)
        if next_round.carried and next_round.wanted is None:
            event["carried"] = next_round.carried
        failpoint("before_commit")
        link = self._next_version.link(self._chain, token, made)
        event["seconds"] = clock.laps
        is_small = is_news(job.layout)
        state = job.server_step.dump(model.master) if is_small and not armed("after_commit") else None
        if not self.session.commit(
            base, counted, token, made.left, next_round, event, link, is_small, state, made.draft, self._stored.token
        ):
            raise LostClaim(f"version {base.token} was reduced by another, or the job ended")
        self._drafts.forget()
        del made, link
        failpoint("after_commit")
        self.current = LoadedVersion(token, model, sha256)
        self.expected = job.gatherer.expected(base.token if job.spec.strategy.lag else token, next_round)
        self._stored.count(counted)
        is_stored = state is not None
        if state is None and self._stored.is_outdated(job.layout.parameters, job.kept_bytes):
            replaced = self._stored.token, self._stored.counted
            is_stored = self.session.store_state(*replaced, token, job.server_step.dump(model.master))
        if is_stored:
            self._stored = StoredState(token)
        failpoint("after_state")
        self._save(self.current, next_round, base.token)
        if job.spec.quorum_of(token.version) < 1:
            self.look_again_s = 0.005  # the next round has a deadline of its own

    def _event(
        self, base: RoundState, token: Token, sha256: str, parts: list[Received], samples: list[int]
    ) -> dict[str, Any]:
        loss = None
        if not self.job.spec.privacy:  # whose workers tell no losses
            loss = sum(part.loss * count for part, count in zip(parts, samples, strict=True)) / sum(samples)
        counted = [[part.micro_batch, part.worker, count] for part, count in zip(parts, samples, strict=True)]
        epoch = base.version // self.job.plan.rounds_per_epoch
        event: dict[str, Any] = {"token": str(token), "version": token.version, "base": str(base.token)}
        return event | {"epoch": epoch, "loss": loss, "sha256": sha256, "counted": counted}

    def _next_round(self, version: int, carried: Sequence[int] = (), before: RoundState | None = None) -> Round:
        """The round that starts from `version`; without units after the last version.

        Args:
            carried: units missing when the round before was closed.
            before: the round before, if known.
        """
        job = self.job
        planned = self._planned = job.spec.round_from(version, carried)
        if version >= self._total:
            return Round(version, planned.epoch, planned.first, 0, 0)
        if planned.wanted is not None and before is not None and not job.plan.ends_epoch(before.version):
            return dataclasses.replace(planned, first=before.first, count=before.count, carried=before.carried)
        return planned

    def _republish(self, state: RoundState, current: LoadedVersion) -> None:
        """Publish the current version again from memory, because the broker's copy is damaged."""
        server_step = self.job.server_step
        whole = server_step.publish_whole(current.model)[0]
        if not self.session.republish(state, whole, server_step.chained):
            raise LostClaim(f"version {state.token} was reduced by another, or the job ended")
        if server_step.chained:
            self._chain.begin_anew(sum(map(len, whole)))
        log.warning("published again", job=self.session.job_id, version=state.version)

    # Checkpoints

    def _save(self, version: LoadedVersion, next_round: Round, base: Token) -> None:
        """Write a checkpoint of a version if one is due."""
        if self.checkpoints.is_due or self._disk_is_full() or self.job.spec.wants_checkpoint(version.token.version):
            self._checkpoint(version, next_round, base)

    def _disk_is_full(self) -> bool:
        """Whether the disk has no room for the next checkpoint, checked before the checkpoint is due."""
        if self.checkpoints.is_writing or time.monotonic() - self._disk_checked_s < DISK_CHECK_S:
            return False
        self._disk_checked_s = time.monotonic()
        needed = max(4 * self.job.layout.parameters, self.artifacts.newest_bytes())
        return Disk.of(self.artifacts.folder).obstacle(needed) is not None

    def _checkpoint(self, version: LoadedVersion, next_round: Round, base: Token | None) -> None:
        """Begin to write a checkpoint. Raises OSError: the one before could not be written.

        Args:
            base: the version before; None: there is none.
        """
        if next_round.wanted is not None:
            left = self.session.pending(version.token)
            if left is None:
                return  # the version has moved on, under another reducer
            next_round = dataclasses.replace(next_round.behind(left[0]), carried=tuple(left[1]))
        job, model = self.job, version.model
        state, average = job.server_step.dump(model.master), job.server_step.averaged(model.published)
        before = job.recovery.published(base) if base and job.spec.strategy.lag and next_round.count else None
        snapshot = Snapshot(
            version.token, model.published, version.sha256, state, next_round, average, job.frozen, before
        )
        self.checkpoints.begin(job.layout, snapshot, job.retention)
        if job.spec.stop:  # no version may lack its score because the reducer died while its checkpoint was written
            self.checkpoints.wait()

    def _retry_checkpoint(self, state: RoundState, current: LoadedVersion) -> None:
        """Write the checkpoint that failed, then the current version's if it wants one. Raises OSError."""
        self.checkpoints.retry()
        if self.job.spec.wants_checkpoint(state.version) and not self.artifacts.has(state.token):
            self._checkpoint(current, self._next_round(state.version, state.carried), state.base)

    def _save_last(self, last: LoadedVersion) -> None:
        """Put the last version on disk before the job is over."""
        self.checkpoints.wait()
        if self.artifacts.has(last.token):
            self.checkpoints.announce(self.artifacts.manifest(last.token))
        else:
            self._checkpoint(last, self._next_round(last.token.version), None)
            self.checkpoints.wait()


def _earliest(parts: dict[int, Received], count: int) -> dict[int, Received]:
    """The `count` updates that arrived first."""
    if len(parts) <= count:
        return parts
    return dict(sorted(parts.items(), key=lambda item: (item[1].at, item[0]))[:count])
