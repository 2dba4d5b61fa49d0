"""A job's rounds, once it is set up: open or resume, then for each full round check, combine, step, commit, save."""

import dataclasses
import struct
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, Literal

import structlog

from computeshare.checkpoints.store import Artifacts
from computeshare.codecs.messages import is_news, update_parts
from computeshare.errors import ArtifactError, CodecError, DamagedRound, LostClaim, ShapeError
from computeshare.jobspec.quorum import Progress, decide, needed
from computeshare.jobspec.sampling_plan import Round
from computeshare.protocol.reducer_session import Claim, Received
from computeshare.protocol.round_store import RoundState
from computeshare.protocol.version_chain import Chain
from computeshare.reducer.checkpointer import Checkpointer, Snapshot
from computeshare.reducer.gather import Refused
from computeshare.reducer.job_setup import JobContext
from computeshare.reducer.recovery import RecoveredVersion, contradiction
from computeshare.reducer.version_step import VersionStep
from computeshare.runtime.durability import Disk
from computeshare.runtime.failpoints import armed, failpoint
from computeshare.runtime.log_lines import REMARK_EVERY_S, Seldom
from computeshare.runtime.processes import return_freed_memory
from computeshare.strategies.load_balancer import Walked
from computeshare.types import Message, Token

if TYPE_CHECKING:
    pass

log = structlog.get_logger()

LOOK_S = 0.25
"""Longest time between looks at a round that may close without all of its micro-batches."""
UNUSABLE = (DamagedRound, LostClaim, ValueError, ArtifactError, CodecError, ShapeError, struct.error)
"""Raised where the broker's data are not whole enough to resume a round."""
DISK_LOOK_S = 1.0
"""Time between looks whether the disk would take a checkpoint."""
Next = Literal["wait", "look again", "over"]


class RoundLoop:
    """Turns one job's rounds into versions."""

    def __init__(
        self, job: JobContext, rounds: Claim, artifacts: Artifacts, checkpoints: Checkpointer, helper: Executor
    ) -> None:
        self.job, self.rounds, self.artifacts, self.checkpoints = job, rounds, artifacts, checkpoints
        self.current: RecoveredVersion | None = None
        """None before the job was opened or resumed, and after a step that failed: its weights were written over."""
        self.look_again_s = LOOK_S
        """Seconds after which the round is to be looked at again though nothing may have happened."""
        self.expected: list[tuple[str, int]] = []
        """The updates of the round at hand by base token and unit, to be read as soon as they are there."""
        self.update_parts = update_parts(job.layout)
        self._total = job.spec.rounds_total
        self._step = VersionStep(job, rounds, helper)
        self._chain = Chain([], Token(0, 0, ""), 0)
        self._planned: Round | None = None
        """The round that was planned last."""
        self._looked_at_disk = 0.0
        self._remarks = Seldom(REMARK_EVERY_S)

    # Opening and resuming

    def open(self) -> None:
        """Publish version 0, or the last checkpoint under a new incarnation if the broker lost the job."""
        job = self.job
        restored = job.standing.on_disk()
        if restored is None and self.rounds.origin():
            raise ArtifactError("the weights that this job was forked from are missing or damaged: fork again")
        manifest = self.artifacts.manifest(restored.token) if restored else None
        carried = manifest.carried if manifest else ()
        if not self.rounds.is_newest():  # a record of an opening ends the incarnation before
            raise LostClaim("another reducer has taken over")
        incarnation = self.artifacts.next_incarnation(restored.token if restored else None)
        version = restored.token.version if restored else 0
        begun = restored.held if restored else job.standing.initial()
        blob, held = job.steps.blob(begun.master, begun.weights)
        sha256 = job.layout.digest(held.weights)
        token = Token(incarnation, version, sha256[:16])
        following = self._following(version, carried)
        if manifest and following.wanted is not None:
            following = dataclasses.replace(following.behind(manifest.next_micro_batch), carried=carried)
        event: dict[str, Any] = {"token": str(token), "version": version, "incarnation": incarnation}
        event |= {"sha256": sha256, "bytes": sum(map(len, blob))}
        event |= {"restored": restored is not None and restored.token.incarnation > 0}  # else it is a fork's beginning
        event |= {"parameters": job.layout.parameters, "kind": job.kind}
        state = job.steps.dump(held.master)
        if not self.rounds.open(token, blob, state, following, event, job.spec.strategy.recent, job.terms):
            raise LostClaim("the job was opened by another reducer")
        return_freed_memory()
        self.current = RecoveredVersion(token, held, sha256)
        self._chain = Chain([token], token, sum(map(len, blob)))
        about = {"version": version, "from_checkpoint": restored is not None, "parameters": job.layout.parameters}
        log.info("opened", job=self.rounds.job_id, **about)

    def resume(self, state: RoundState) -> None:
        """Take over the running round `state` from the broker. Raises one of UNUSABLE."""
        self._check(state)
        self.current, self._chain = self.job.standing.in_broker(state)
        log.info("took over", job=self.rounds.job_id, version=state.version)

    def save_if_wanted(self, state: RoundState) -> None:
        """Write the current version's checkpoint if it wants one: the reducer before may have died before it did."""
        assert self.current is not None
        if self.job.spec.wants_checkpoint(state.version):
            self._checkpoint(self.current, self._following(state.version, state.carried))

    # The loop

    def go_on(self, state: RoundState, parts: dict[int, Received], ahead: dict[tuple[str, int], Message]) -> Next:
        """Do what is due in the round `state`.

        Args:
            parts: unit to its update, of those received.
            ahead: updates that were read already, by base token and unit.
        Raises: DamagedRound: the round cannot be of this job; LostClaim.
        """
        if self.current is None or self.current.token != state.token:
            raise LostClaim(f"version {state.token} was committed by another reducer")
        self._check(state)
        if state.status == "finished":
            self._settle(self.current)
            return "over"
        self.checkpoints.notice()
        if self.checkpoints.is_stuck and state.status == "running":
            self._save_again(state, self.current)
        if state.doubted:
            self._republish(state, self.current)
        if self.checkpoints.is_stuck:
            return "wait"  # until a user resumes the job
        if len(parts) >= state.needed or state.closed:
            self.job.gatherer.ahead = ahead
            self._reduce(state, self.current, _first_to_come(parts, state.needed))
        elif self._closes(state, len(parts)):
            return "look again"
        return "wait"

    def _check(self, state: RoundState) -> None:
        """Raises DamagedRound: the round cannot be of this job."""
        planned = self._planned
        if planned is None or (planned.version, planned.carried) != (state.version, state.carried):
            planned = self._planned = self.job.spec.round_from(state.version, state.carried)
        if why := contradiction(state, planned, self._total):
            raise DamagedRound(why)

    def _closes(self, state: RoundState, received: int) -> bool:
        """Close the round without the late updates, if it is time to."""
        quorum = self.job.spec.quorum_of(state.version)
        self.look_again_s = LOOK_S
        if quorum == 1:
            return False
        waited_ms = self.rounds.now_ms() - state.opened_ms
        decision = decide(Progress(received, state.total, waited_ms, state.deadline_ms), quorum)
        if decision.ask_again_ms is not None:
            self.look_again_s = min(LOOK_S, max(0.005, decision.ask_again_ms / 1000))
        closed = decision.close and self.rounds.close(state.token, needed(state.total, quorum))
        if closed:
            about = {"job": self.rounds.job_id, "token": str(state.token), "reason": decision.reason}
            self._remarks.tell(log.info, "closed", **about)
        return closed

    def _reduce(self, base: RoundState, current: RecoveredVersion, parts: dict[int, Received]) -> None:
        """Turn a full round into the next version: combine, step, send, commit, and store the optimizer's state while
        the next round is computed.
        """
        job, clock = self.job, _Clock()
        counted = [parts[m] for m in sorted(parts)]
        samples = [job.plan.unit_size(part.micro_batch, base.sizes) for part in counted]
        try:
            gradient, buffers, staleness = self._step.combine(base, parts, samples)
        except Refused:
            return
        failpoint("after_gather")
        clock.lap("combine")
        self.current = None  # it is written over: if anything fails, start again from what Redis holds
        full, digest = self._step.step(base.version, current.held, gradient, buffers)
        del gradient
        clock.lap("step")
        weights, held = job.steps.publish(full, current.held.weights, base.version + 1)
        master = held.master
        del current, full
        left, sha256 = self._step.begin(weights, held.weights, digest)
        token = Token(base.token.incarnation, base.version + 1, sha256[:16])
        event = self._event(base, token, sha256, counted, samples)
        if any(staleness):
            event["staleness"] = staleness
        self._learn(base, counted)
        following = self._following(token.version, tuple(m for m in base.units if m not in parts), base)
        if following.carried and following.wanted is None:
            event["carried"] = following.carried
        clock.lap("encode")
        failpoint("before_commit")
        link = self._step.link(self._chain, token, held, weights)
        event["seconds"] = clock.laps
        is_small = is_news(job.layout)
        state = job.steps.dump(master) if is_small and not armed("after_commit") else None
        if not self.rounds.commit(base, counted, token, left, following, event, link, is_small, state):
            raise LostClaim(f"version {base.token} was reduced by another, or the job ended")
        del weights, left, link
        failpoint("after_commit")
        self.current = RecoveredVersion(token, held, sha256)
        self.expected = job.gatherer.expected(token, following)
        if state is None:
            done = [(part.base, part.micro_batch) for part in counted]
            self.rounds.store_state(base.token, done, token, job.steps.dump(master))
        failpoint("after_state")
        self._save(self.current, following)
        if job.spec.quorum_of(token.version) < 1:
            self.look_again_s = 0.005  # the next round has a deadline of its own

    def _event(
        self, base: RoundState, token: Token, sha256: str, parts: list[Received], samples: list[int]
    ) -> dict[str, Any]:
        loss = sum(part.loss * count for part, count in zip(parts, samples, strict=True)) / sum(samples)
        counted = [[part.micro_batch, part.worker, count] for part, count in zip(parts, samples, strict=True)]
        epoch = base.version // self.job.plan.rounds_per_epoch
        event: dict[str, Any] = {"token": str(token), "version": token.version, "base": str(base.token)}
        return event | {"epoch": epoch, "loss": loss, "sha256": sha256, "counted": counted}

    def _following(self, version: int, carried: Sequence[int] = (), before: RoundState | None = None) -> Round:
        """The round that starts from `version`; without units after the last version.

        Args:
            carried: units that the round before was closed without.
            before: the round before, if it is at hand.
        """
        job = self.job
        planned = self._planned = job.spec.round_from(version, carried)
        if version >= self._total:
            return Round(version, planned.epoch, planned.first, 0, 0)
        if planned.wanted is not None and before is not None and not job.plan.ends_epoch(before.version):
            return dataclasses.replace(planned, first=before.first, count=before.count, carried=before.carried)
        if job.divider and before is not None:
            sizes, owners = job.divider.divide(job.plan.micro_batches_in(planned), planned.count)
            return dataclasses.replace(planned, sizes=sizes, owners=owners)
        return planned

    def _learn(self, base: RoundState, parts: Sequence[Received]) -> None:
        """Take in how fast the round's workers were, where that decides how the next round is divided."""
        if self.job.divider:
            micro_batches = [len(self.job.plan.micro_batches(part.micro_batch, base.sizes)) for part in parts]
            walked = [Walked(p.worker, n, p.leased, p.at) for p, n in zip(parts, micro_batches, strict=True)]
            self.job.divider.learn(walked)

    def _republish(self, state: RoundState, current: RecoveredVersion) -> None:
        """Publish the current version again, from memory: the broker's copy is damaged."""
        steps, held = self.job.steps, current.held
        whole = steps.blob(held.master, held.weights)[0]
        if not self.rounds.republish(state, whole, steps.chained):
            raise LostClaim(f"version {state.token} was reduced by another, or the job ended")
        if steps.chained:
            self._chain.begin_anew(sum(map(len, whole)))
        log.warning("published again", job=self.rounds.job_id, version=state.version)

    # Checkpoints

    def _save(self, version: RecoveredVersion, following: Round) -> None:
        """Write a checkpoint of a version if one is due."""
        if self.checkpoints.is_due or self._finds_no_room() or self.job.spec.wants_checkpoint(version.token.version):
            self._checkpoint(version, following)

    def _finds_no_room(self) -> bool:
        """Whether the next checkpoint cannot be written: better to hear of it now than once it is due."""
        if self.checkpoints.is_writing or time.monotonic() - self._looked_at_disk < DISK_LOOK_S:
            return False
        self._looked_at_disk = time.monotonic()
        return Disk.of(self.artifacts.folder).obstacle(4 * self.job.layout.parameters) is not None

    def _checkpoint(self, version: RecoveredVersion, following: Round) -> None:
        """Write a checkpoint beside the rounds. Raises OSError: the one before could not be written."""
        if following.wanted is not None:
            left = self.rounds.pending(version.token)
            if left is None:
                return  # the version has moved on, under another reducer
            following = dataclasses.replace(following.behind(left[0]), carried=tuple(left[1]))
        job, held = self.job, version.held
        snapshot = Snapshot(version.token, held.weights, version.sha256, job.steps.dump(held.master), following)
        self.checkpoints.begin(job.layout, snapshot, job.retention)

    def _save_again(self, state: RoundState, current: RecoveredVersion) -> None:
        """Write the checkpoint that could not be written, before anything else is done. Raises OSError."""
        self.checkpoints.retry()
        if self.job.spec.wants_checkpoint(state.version) and not self.artifacts.has(state.token):
            self._checkpoint(current, self._following(state.version, state.carried))

    def _settle(self, last: RecoveredVersion) -> None:
        """Make sure that the last version is on disk before letting the job go."""
        self.checkpoints.wait()
        if self.artifacts.has(last.token):
            self.checkpoints.announce(self.artifacts.manifest(last.token))
        else:
            self._checkpoint(last, self._following(last.token.version))
            self.checkpoints.wait()


def _first_to_come(parts: dict[int, Received], count: int) -> dict[int, Received]:
    """As many of the received updates as make a version, the earliest of them."""
    if len(parts) <= count:
        return parts
    return dict(sorted(parts.items(), key=lambda one: (one[1].at, one[0]))[:count])


class _Clock:
    """Seconds between laps, by name."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = round(now - self._last, 6)
        self._last = now
