"""One job's rounds in a reducer: open or resume, gather, check, combine, step, commit, checkpoint."""

import dataclasses
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog

from computeshare.checkpoints.retention import Retention
from computeshare.checkpoints.store import Artifacts
from computeshare.codecs import CODECS
from computeshare.codecs.messages import is_news, update_parts
from computeshare.errors import ArtifactError, CodecError, DamagedRound, Diverged, LostClaim, ShapeError
from computeshare.jobspec.quorum import Progress, decide, needed
from computeshare.jobspec.sampling_plan import Round
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol.reducer_session import Claim, Link, Received
from computeshare.protocol.round_store import RoundState
from computeshare.protocol.terms import Terms
from computeshare.protocol.version_chain import Chain
from computeshare.reducer.checkpointer import Checkpointer, Snapshot
from computeshare.reducer.codec_choice import Decider, Undecided
from computeshare.reducer.gather import Gatherer, Refused
from computeshare.reducer.recovery import RecoveredVersion, Standing, behind, contradiction
from computeshare.runtime.durability import Disk
from computeshare.runtime.failpoints import armed, failpoint
from computeshare.runtime.log_lines import REMARK_EVERY_S, Seldom
from computeshare.runtime.processes import return_freed_memory
from computeshare.strategies.averages import Mean
from computeshare.strategies.load_balancer import Walked
from computeshare.tensors.layout import Digest, Layout, Weights
from computeshare.types import Blob, Message, Token, Vector

if TYPE_CHECKING:
    from computeshare.training.server_step import Held

log = structlog.get_logger()

LOOK_S = 0.25
"""Longest time between looks at a round that may close without all of its micro-batches."""
UNUSABLE = (DamagedRound, LostClaim, ValueError, ArtifactError, CodecError, ShapeError, struct.error)
"""What is raised where the broker does not hold all that a round is resumed from, undamaged."""
DISK_LOOK_S = 1.0
"""Time between looks whether the disk would take a checkpoint."""
HELD_S = 5.0
"""How long a job that the disk holds up waits before the disk is tried again, in seconds."""
FOLD_S = 1.0
"""Time between looks whether too many events wait for the control plane."""
MOST_FOLDS = 10


class JobReducer:
    """Turns rounds into versions, from wherever the job stands."""

    def __init__(self, rounds: Claim, artifacts: Path) -> None:
        self.rounds = rounds
        self.artifacts = Artifacts(artifacts, rounds.job_id)
        self.current: RecoveredVersion | None = None
        self.look_again_s = LOOK_S
        """How soon `advance` is to be called again though nothing may have happened."""
        self.is_looking = False
        """Whether nothing has been done since `advance` was called but to ask how the job stands."""
        self.checkpoints = Checkpointer(rounds, self.artifacts)
        self.decider = Decider(rounds, self.artifacts)
        self._expected: list[tuple[str, int]] = []
        self._parts = self._update_bytes = 0
        self._own: Round | None = None
        """The last round that was worked out from the job's plan."""
        self._held_until = 0.0
        self._looked_at_disk = 0.0
        self._fold_at = 0.0
        self._helper = ThreadPoolExecutor(1, "beside")
        self._remarks = Seldom(REMARK_EVERY_S)

    @property
    def is_held(self) -> bool:
        """Whether the disk takes no checkpoint: nothing is done until it is tried again."""
        return time.monotonic() < self._held_until

    def advance(self, patience_s: float = 0.0) -> bool:
        """Do whatever is due; False once there is nothing left to do for this job.

        Args:
            patience_s: how long to wait for a round that is full, in seconds, unless the job is held.
        """
        if self.is_held:
            return True
        try:
            return self._advance(patience_s)
        except Undecided:
            return True
        except OSError as error:
            self._hold(error)
            return True

    def _advance(self, patience_s: float) -> bool:
        self.is_looking = True
        try:
            seen = self.rounds.look(self._expected, self._parts, patience_s, self._update_bytes)
            self.is_looking = False
            return self._go_on(*seen)
        except DamagedRound as error:
            self.is_looking = False
            return self._open_again(str(error))

    def _go_on(
        self, state: RoundState | None, parts: dict[int, Received], ahead: dict[tuple[str, int], Message]
    ) -> bool:
        """Do what a look at the job says is due. Raises DamagedRound: what it saw cannot be."""
        if state is not None and state.status not in ("running", "paused", "finished"):
            return False
        self._fold_events()
        if state is None or self.current is None:
            if not self._prepare():
                return False
            if state is None or not self._resumed(state):
                self._open()
                return True
            return_freed_memory()
        if self.current is None or self.current.token != state.token:
            raise LostClaim(f"version {state.token} was committed by another reducer")
        self._check(state)
        if state.status == "finished":
            self._settle()
            return False
        self.checkpoints.notice()
        if self.checkpoints.is_stuck and state.status == "running":
            self._save_again(state)
        if state.doubted:
            self._republish(state)
        if self.checkpoints.is_stuck:
            pass  # until somebody resumes it
        elif len(parts) >= state.needed or state.closed:
            self.gatherer.ahead = ahead
            self._reduce(state, _first_to_come(parts, state.needed))
        elif self._closes(state, len(parts)):
            return self.advance()
        return True

    def _fold_events(self) -> None:
        """Keep what waits for a control plane that is away within bounds, a piece of it at a time."""
        if time.monotonic() < self._fold_at:
            return
        self._fold_at = time.monotonic() + FOLD_S
        if moved := sum(takewhile(bool, (self.rounds.fold() for _ in range(MOST_FOLDS)))):
            self._remarks.tell(log.info, "events folded", job=self.rounds.job_id, events=moved)

    def fail(self, error: str, detail: str) -> None:
        """Tell the control plane that the job cannot go on: why, on one line, and the traceback."""
        if self.rounds.announce("failed", {"error": error, "detail": detail}):
            self.rounds.end("failed")

    def _hold(self, error: OSError) -> None:
        """Have the control plane pause the job, for what makes it durable cannot be written; try again in a while."""
        self._held_until = time.monotonic() + HELD_S
        why = Disk.of(self.artifacts.folder.parent).explained(error)
        reason = f"a checkpoint cannot be written: {why}, then resume the job"
        log.error("held", job=self.rounds.job_id, reason=reason)
        if not self.rounds.announce("held", {"reason": reason}):
            raise LostClaim("another reducer has taken over, or the job is gone")

    def is_saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return self.checkpoints.is_writing

    def close(self) -> None:
        """Let checkpoints that are being written finish."""
        self.checkpoints.close()
        self._helper.shutdown(wait=False)

    # What the job needs: built once

    def _prepare(self) -> bool:
        """False if the job is gone. Raises Undecided."""
        raw = self.rounds.spec()
        if raw is None:
            return False
        spec = self.decider.decide(JobSpec.model_validate_json(raw))
        import torch

        from computeshare.tasks import models
        from computeshare.training import devices
        from computeshare.training.server_step import Steps

        self.spec, self.plan, self._total = spec, spec.plan, spec.rounds_total
        self.layout: Layout = models.layout_for(spec)
        self._parts = update_parts(self.layout)
        up = CODECS[spec.codecs.up]
        self.gatherer = Gatherer(self.rounds, up, self.layout, spec.plan, self._helper, spec.sharers)
        self._update_bytes = self.gatherer.limit
        self.steps = Steps(spec, self.layout)
        self.standing = Standing(self.rounds, self.artifacts, spec, self.steps, self.gatherer)
        self.retention = Retention(self.artifacts, spec)
        self.divider = spec.strategy.divider()
        self.kind = devices.kind(torch.device("cpu"))
        return True

    # Opening and resuming

    def _open(self) -> None:
        """Publish version 0, or the last checkpoint under a new incarnation if the broker lost the job."""
        restored = self.standing.on_disk()
        if restored is None and self.rounds.origin():
            raise ArtifactError("the weights that this job was forked from are missing or damaged: fork again")
        manifest = self.artifacts.manifest(restored.token) if restored else None
        carried = manifest.carried if manifest else ()
        if not self.rounds.is_newest():  # a record of an opening ends the incarnation before
            raise LostClaim("another reducer has taken over")
        incarnation = self.artifacts.next_incarnation(restored.token if restored else None)
        version = restored.token.version if restored else 0
        begun = restored.held if restored else self.standing.initial()
        blob, held = self.steps.blob(begun.master, begun.weights)
        sha256 = self.layout.digest(held.weights)
        token = Token(incarnation, version, sha256[:16])
        following = self._following(version, carried)
        if manifest and following.wanted is not None:
            following = dataclasses.replace(following.behind(manifest.next_micro_batch), carried=carried)
        event: dict[str, Any] = {"token": str(token), "version": version, "incarnation": incarnation}
        event |= {"sha256": sha256, "bytes": sum(map(len, blob))}
        event |= {"restored": restored is not None and restored.token.incarnation > 0}  # else it is a fork's beginning
        event |= {"parameters": self.layout.parameters, "kind": self.kind}
        if not self.rounds.open(
            token, blob, self.steps.dump(held.master), following, event, self.spec.strategy.recent, self._terms()
        ):
            raise LostClaim("the job was opened by another reducer")
        return_freed_memory()
        self.current = RecoveredVersion(token, held, sha256)
        self.chain = Chain([token], token, sum(map(len, blob)))
        about = {"version": version, "from_checkpoint": restored is not None, "parameters": self.layout.parameters}
        log.info("opened", job=self.rounds.job_id, **about)

    def _terms(self) -> Terms:
        spec, strategy = self.spec, self.spec.strategy
        return Terms(strategy.backup, spec.sharers, spec.workers.min, strategy.most_unmeasured, self.gatherer.limit)

    def _resumed(self, state: RoundState) -> bool:
        """Take over a running job from what the broker holds of it; False if that was of no use and is given up.

        Raises LostClaim: another reducer goes on, or the broker has lost the job.
        """
        if self.standing.went_back(state):
            return False
        try:
            self._check(state)
            self.current, self.chain = self.standing.in_broker(state)
        except UNUSABLE as error:
            self._give_up(str(error))
            return False
        log.info("took over", job=self.rounds.job_id, version=state.version)
        if self.spec.wants_checkpoint(state.version):
            # The reducer before may have died between commit and file.
            self._checkpoint(self.current, self._following(state.version, state.carried))
        return True

    def _check(self, state: RoundState) -> None:
        """Raises DamagedRound: the round cannot be of this job."""
        own = self._own
        if own is None or (own.version, own.carried) != (state.version, state.carried):
            own = self._own = self.spec.round_from(state.version, state.carried)
        if why := contradiction(state, own, self._total):
            raise DamagedRound(why)

    def _open_again(self, error: str) -> bool:
        """Have the job go on from its last checkpoint; False if it is gone. Raises LostClaim."""
        if self.current is None and not self._prepare():
            return False
        self._give_up(error)
        self._open()
        return True

    def _give_up(self, error: str) -> None:
        """Drop what the broker holds of the job's rounds. Raises LostClaim: another reducer goes on."""
        if not self.rounds.discard():
            raise LostClaim(f"another reducer goes on: {error}")
        log.error("rounds given up", job=self.rounds.job_id, error=error)
        self.rounds.announce("mended", {"error": error})

    # The round

    def _closes(self, state: RoundState, received: int) -> bool:
        """Close the round without what is late, if it is time to."""
        quorum = self.spec.quorum_of(state.version)
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

    def _reduce(self, base: RoundState, parts: dict[int, Received]) -> None:
        """One round: gather, check, combine, step, commit, and keep the state in the next round's shadow."""
        current = self.current
        assert current is not None
        clock = _Clock()
        counted = [parts[m] for m in sorted(parts)]
        samples = [self.plan.unit_size(part.micro_batch, base.sizes) for part in counted]
        staleness = [behind(part.base, base.token) for part in counted]
        try:
            gradient, buffers = self._gathered(base, parts, samples, staleness)
        except Refused:
            return
        failpoint("after_gather")
        clock.lap("combine")
        self.current = None  # it is written over: if anything fails, start again from what Redis holds
        full, digest = self._stepped(base, current.held, gradient, buffers)
        del gradient
        clock.lap("step")
        weights, held = self.steps.publish(full, current.held.weights, base.version + 1)
        master = held.master
        del current, full
        left, sha256 = self._begin(weights, held.weights, digest)
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
        link = self._link(token, held, weights)
        event["seconds"] = clock.laps
        is_small = is_news(self.layout)
        state = self.steps.dump(master) if is_small and not armed("after_commit") else None
        if not self.rounds.commit(base, counted, token, left, following, event, link, is_small, state):
            raise LostClaim(f"version {base.token} was reduced by another, or the job ended")
        del weights, left, link
        failpoint("after_commit")
        self.current = RecoveredVersion(token, held, sha256)
        self._expected = self.gatherer.expected(token, following)
        if state is None:
            done = [(part.base, part.micro_batch) for part in counted]
            self.rounds.store_state(base.token, done, token, self.steps.dump(master))
        failpoint("after_state")
        self._keep(self.current, following)
        if self.spec.quorum_of(token.version) < 1:
            self.look_again_s = 0.005  # the next round has a deadline of its own

    def _gathered(
        self, base: RoundState, parts: dict[int, Received], samples: Sequence[int], staleness: Sequence[int]
    ) -> tuple[Vector, Vector]:
        """What a round's updates combine to, and the mean of their buffers. Raises Refused."""
        buffers = Mean(sum(samples))

        def read(bucket: int) -> Iterator[Vector]:
            nonlocal buffers
            buffers = Mean(sum(samples))  # the last time that the last bucket is read counts
            return self.gatherer.checked(base, parts, bucket, buffers)

        try:
            return self.steps.combine(read, samples, staleness), buffers.value
        finally:
            self.gatherer.settle()

    def _stepped(
        self, base: RoundState, held: "Held", gradient: Vector, buffers: Vector
    ) -> tuple[Weights, "Future[str] | None"]:
        """The next version's full-precision weights; and their digest, begun on while they were being worked out, if
        they are large, and what workers get. Raises Diverged.
        """
        others = self.steps.others(buffers, held.weights)
        digest = Digest(self.layout, *others) if self.steps.is_exact and len(self.layout.buckets) > 1 else None

        def ready(parameters: Vector) -> None:
            if not np.isfinite(parameters).all():
                raise Diverged(f"Training diverged at version {base.version}: the step produced NaN or infinity")
            if digest:
                self._helper.submit(digest.add, parameters)

        master = self.steps.move(held, gradient, ready)
        return Weights(master, *others), self._helper.submit(digest.hexdigest) if digest else None

    def _begin(
        self, parts: Iterable[Blob], weights: Weights, digest: "Future[str] | None"
    ) -> tuple[Sequence[Blob], str]:
        """Send the next version's weights on, if they are large, while their digest is worked out.

        Returns: what is left to send, and the digest.
        """
        if len(self.layout.buckets) == 1:
            return [*parts], self.layout.digest(weights)
        digest = digest or self._helper.submit(self.layout.digest, weights)
        return self.rounds.begin(parts), digest.result()

    def _link(self, token: Token, held: "Held", delta: Iterable[Blob]) -> Link | None:
        """What becomes of the chain with the next version, if that is published as a difference."""
        if not self.steps.chained:
            return None
        chain = self.chain
        chain.add(token, sum(map(len, delta)))
        if not chain.wants_snapshot:
            return Link()
        outdated = chain.outdated
        whole = self.steps.blob(held.master, held.weights)[0]
        chain.renew(token, sum(map(len, whole)))
        return Link(whole, len(chain.tokens) - 1, outdated)

    def _event(
        self, base: RoundState, token: Token, sha256: str, parts: list[Received], samples: list[int]
    ) -> dict[str, Any]:
        loss = sum(part.loss * count for part, count in zip(parts, samples, strict=True)) / sum(samples)
        counted = [[part.micro_batch, part.worker, count] for part, count in zip(parts, samples, strict=True)]
        epoch = base.version // self.plan.rounds_per_epoch
        event: dict[str, Any] = {"token": str(token), "version": token.version, "base": str(base.token)}
        return event | {"epoch": epoch, "loss": loss, "sha256": sha256, "counted": counted}

    # Publishing and keeping

    def _republish(self, state: RoundState) -> None:
        """Publish the current version again, from memory: what the broker holds of it is damaged."""
        assert self.current is not None
        held = self.current.held
        whole = self.steps.blob(held.master, held.weights)[0]
        if not self.rounds.republish(state, whole, self.steps.chained):
            raise LostClaim(f"version {state.token} was reduced by another, or the job ended")
        if self.steps.chained:
            self.chain.begin_anew(sum(map(len, whole)))
        log.warning("published again", job=self.rounds.job_id, version=state.version)

    def _following(self, version: int, carried: Sequence[int] = (), before: RoundState | None = None) -> Round:
        """The round from `version`; without units after the last one.

        Args:
            carried: what was left of the round before, if that was closed without it.
            before: the round before, if it is at hand.
        """
        own = self._own = self.spec.round_from(version, carried)
        if version >= self.spec.rounds_total:
            return Round(version, own.epoch, own.first, 0, 0)
        if own.wanted is not None and before is not None and not self.plan.ends_epoch(before.version):
            return dataclasses.replace(own, first=before.first, count=before.count, carried=before.carried)
        if self.divider and before is not None:
            sizes, owners = self.divider.divide(self.plan.micro_batches_in(own), own.count)
            return dataclasses.replace(own, sizes=sizes, owners=owners)
        return own

    def _learn(self, base: RoundState, parts: Sequence[Received]) -> None:
        """Take in how fast the round's workers were, where that decides how the next one is divided."""
        if self.divider:
            micro_batches = [len(self.plan.micro_batches(part.micro_batch, base.sizes)) for part in parts]
            self.divider.learn([Walked(p.worker, n, p.leased, p.at) for p, n in zip(parts, micro_batches, strict=True)])

    def _keep(self, version: RecoveredVersion, following: Round) -> None:
        if self.checkpoints.is_due or self._finds_no_room() or self.spec.wants_checkpoint(version.token.version):
            self._checkpoint(version, following)

    def _finds_no_room(self) -> bool:
        """Whether the next checkpoint cannot be written: better to hear of it now than once it is due."""
        if self.checkpoints.is_writing or time.monotonic() - self._looked_at_disk < DISK_LOOK_S:
            return False
        self._looked_at_disk = time.monotonic()
        return Disk.of(self.artifacts.folder).obstacle(4 * self.layout.parameters) is not None

    def _checkpoint(self, version: RecoveredVersion, following: Round) -> None:
        """Write a checkpoint beside the rounds. Raises OSError: the one before could not be written."""
        if following.wanted is not None:
            left = self.rounds.pending(version.token)
            if left is None:
                return  # the version has moved on, under another reducer
            following = dataclasses.replace(following.behind(left[0]), carried=tuple(left[1]))
        held = version.held
        snapshot = Snapshot(version.token, held.weights, version.sha256, self.steps.dump(held.master), following)
        self.checkpoints.begin(self.layout, snapshot, self.retention)

    def _save_again(self, state: RoundState) -> None:
        """Write what could not be written, before anything else is done. Raises OSError."""
        assert self.current is not None
        self.checkpoints.retry()
        if self.spec.wants_checkpoint(state.version) and not self.artifacts.has(state.token):
            self._checkpoint(self.current, self._following(state.version, state.carried))

    def _settle(self) -> None:
        """Make sure that the last version is on disk before letting the job go."""
        assert self.current is not None
        self.checkpoints.wait()
        if self.artifacts.has(self.current.token):
            self.checkpoints.announce(self.artifacts.manifest(self.current.token))
        else:
            self._checkpoint(self.current, self._following(self.current.token.version))
            self.checkpoints.wait()


def _first_to_come(parts: dict[int, Received], count: int) -> dict[int, Received]:
    """As many of what was received as make a version, the earliest of them."""
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
