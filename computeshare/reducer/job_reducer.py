"""One job in a reducer: look at its round, set the job up where that is needed, and do what is due."""

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path

import structlog

from computeshare.checkpoints.store import Artifacts
from computeshare.errors import DamagedRound, LostClaim
from computeshare.protocol.reducer_session import Claim, Received
from computeshare.protocol.round_store import RoundState
from computeshare.reducer.checkpointer import Checkpointer
from computeshare.reducer.codec_choice import Decider, Undecided
from computeshare.reducer.job_setup import set_up
from computeshare.reducer.round_loop import LOOK_S, UNUSABLE, RoundLoop
from computeshare.runtime.durability import Disk
from computeshare.runtime.log_lines import REMARK_EVERY_S, Seldom
from computeshare.runtime.processes import return_freed_memory
from computeshare.types import Message

log = structlog.get_logger()

HELD_S = 5.0
"""How long a job that the disk holds up waits before the disk is tried again, in seconds."""
FOLD_S = 1.0
"""Time between looks whether too many events wait for the control plane."""
MOST_FOLDS = 10


class JobReducer:
    """Turns a job's rounds into versions, from wherever the job stands."""

    def __init__(self, rounds: Claim, artifacts: Path) -> None:
        self.rounds = rounds
        self.artifacts = Artifacts(artifacts, rounds.job_id)
        self.checkpoints = Checkpointer(rounds, self.artifacts)
        self.loop: RoundLoop | None = None
        """None until the job was set up."""
        self.is_looking = False
        """Whether `advance` has done nothing yet but ask how the job stands."""
        self._decider = Decider(rounds, self.artifacts)
        self._helper = ThreadPoolExecutor(1, "beside")
        self._held_until = 0.0
        self._fold_at = 0.0
        self._remarks = Seldom(REMARK_EVERY_S)

    @property
    def look_again_s(self) -> float:
        """Seconds after which `advance` is to be called again though nothing may have happened."""
        return self.loop.look_again_s if self.loop else LOOK_S

    @property
    def is_held(self) -> bool:
        """Whether the disk takes no checkpoint: nothing is done until the disk is tried again."""
        return time.monotonic() < self._held_until

    def advance(self, patience_s: float = 0.0) -> bool:
        """Do whatever is due; False once nothing is left to do for this job.

        Args:
            patience_s: how long to wait for a full round, in seconds, unless the job is held.
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
            expected = self.loop.expected if self.loop else ()
            parts, limit = (self.loop.update_parts, self.loop.job.gatherer.limit) if self.loop else (0, 0)
            seen = self.rounds.look(expected, parts, patience_s, limit)
            self.is_looking = False
            return self._go_on(*seen)
        except DamagedRound as error:
            self.is_looking = False
            return self._open_again(str(error))

    def _go_on(
        self, state: RoundState | None, parts: dict[int, Received], ahead: dict[tuple[str, int], Message]
    ) -> bool:
        """Do what is due in the round that was seen; False once nothing is left. Raises DamagedRound."""
        if state is not None and state.status not in ("running", "paused", "finished"):
            return False
        self._fold_events()
        loop = self.loop
        if state is None or loop is None or loop.current is None:
            loop = self._set_up()
            if loop is None:
                return False
            if state is None or not self._takes_over(loop, state):
                loop.open()
                return True
            return_freed_memory()
        match loop.go_on(state, parts, ahead):
            case "look again":
                return self.advance()
            case "over":
                return False
        return True

    def _set_up(self) -> RoundLoop | None:
        """Build what the job needs, before its first round here; None if the job is gone. Raises Undecided."""
        job = set_up(self.rounds, self.artifacts, self._decider, self._helper)
        self.loop = RoundLoop(job, self.rounds, self.artifacts, self.checkpoints, self._helper) if job else None
        return self.loop

    def _takes_over(self, loop: RoundLoop, state: RoundState) -> bool:
        """Take over a running job from the broker; False where its data are of no use, which are dropped then.

        Raises LostClaim: another reducer goes on, or the broker has lost the job.
        """
        if loop.job.standing.went_back(state):
            return False
        try:
            loop.resume(state)
        except UNUSABLE as error:
            self._give_up(str(error))
            return False
        loop.save_if_wanted(state)
        return True

    def _open_again(self, error: str) -> bool:
        """Have the job go on from its last checkpoint; False if it is gone. Raises LostClaim."""
        loop = self.loop if self.loop and self.loop.current else self._set_up()
        if loop is None:
            return False
        self._give_up(error)
        loop.open()
        return True

    def _give_up(self, error: str) -> None:
        """Drop the broker's data of the job's rounds. Raises LostClaim: another reducer goes on."""
        if not self.rounds.discard():
            raise LostClaim(f"another reducer goes on: {error}")
        log.error("rounds given up", job=self.rounds.job_id, error=error)
        self.rounds.announce("mended", {"error": error})

    def _fold_events(self) -> None:
        """Fold the oldest events where too many wait for a control plane that is away, some at a time."""
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
        """Have the control plane pause the job, whose checkpoint cannot be written; try again in HELD_S."""
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
