"""One job in a reducer: look at its round, set the job up if needed, and handle the round."""

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path

import structlog

from computeshare.bundles.store import BundleStore
from computeshare.checkpoints.store import Artifacts
from computeshare.errors import DamagedRound, LostClaim
from computeshare.protocol.reducer_session import ReducerSession
from computeshare.protocol.refusal import Received
from computeshare.protocol.round_store import RoundState
from computeshare.queue.recipe_runner import RecipeRunner
from computeshare.reducer.checkpointer import Checkpointer
from computeshare.reducer.codec_choice import Decider, Undecided
from computeshare.reducer.job_setup import set_up
from computeshare.reducer.round_handler import ROUND_POLL_S, UNUSABLE, RoundHandler
from computeshare.runtime.durability import Disk
from computeshare.runtime.log_lines import REMARK_EVERY_S, Seldom
from computeshare.runtime.processes import return_freed_memory
from computeshare.types import Message

log = structlog.get_logger()

DISK_RETRY_S = 5.0
"""How long a held job waits before the disk is tried again, in seconds."""
FOLD_S = 1.0
"""Seconds between checks that too many events wait for the control plane."""
MOST_FOLDS = 10


class JobReducer:
    """Turns a job's rounds into versions, from wherever the job stands."""

    def __init__(
        self, session: ReducerSession, artifacts: Path, bundles: Path, recipes: RecipeRunner | None = None
    ) -> None:
        """`recipes`: None: this process runs none."""
        self.session, self._recipes = session, recipes
        self.artifacts, self.bundles = Artifacts(artifacts, session.job_id), BundleStore(bundles)
        self.checkpoints = Checkpointer(session, self.artifacts)
        self.handler: RoundHandler | None = None
        """None until the job is set up."""
        self.is_looking = False
        """Whether `advance` has only read the round so far, and changed nothing."""
        self._decider = Decider(session, self.artifacts)
        self._helper = ThreadPoolExecutor(1, "beside")
        self._held_until = 0.0
        self._fold_at = 0.0
        self._remarks = Seldom(REMARK_EVERY_S)

    @property
    def look_again_s(self) -> float:
        """Longest wait before the next call of `advance`, in seconds."""
        return self.handler.look_again_s if self.handler else ROUND_POLL_S

    @property
    def is_held(self) -> bool:
        """Whether the job is held: a checkpoint could not be written, and the disk is tried again later."""
        return time.monotonic() < self._held_until

    def advance(self, patience_s: float = 0.0) -> bool:
        """Do the work that is due; False once the job needs no reducer any more.

        Args:
            patience_s: how long to wait for a complete round, in seconds, unless the job is held.
        """
        if self.is_held:
            return True
        try:
            return self._look(patience_s)
        except Undecided:
            return True
        except OSError as error:
            self._hold(error)
            return True

    def _look(self, patience_s: float) -> bool:
        self.is_looking = True
        try:
            expected = self.handler.expected if self.handler else ()
            parts, limit = (self.handler.update_parts, self.handler.job.gatherer.limit) if self.handler else (0, 0)
            seen = self.session.look(expected, parts, patience_s, limit)
            self.is_looking = False
            return self._handle(*seen)
        except DamagedRound as error:
            self.is_looking = False
            return self._open_again(str(error))

    def _handle(
        self, state: RoundState | None, parts: dict[int, Received], ahead: dict[tuple[str, int], Message]
    ) -> bool:
        """Handle the round that was read; False once the job needs no reducer any more. Raises DamagedRound."""
        if state is not None and state.status not in ("running", "paused", "finished"):
            return False
        self._fold_events()
        handler = self.handler
        if state is None or handler is None or handler.current is None:
            handler = self._set_up()
            if handler is None:
                return False
            if state is None or not self._takes_over(handler, state):
                handler.open()
                return True
            return_freed_memory()
        match handler.handle(state, parts, ahead):
            case "look again":
                return self.advance()
            case "over":
                return False
        return True

    def _set_up(self) -> RoundHandler | None:
        """Build the job's context and its round handler; None if the job is gone. Raises Undecided."""
        job = set_up(self.session, self.artifacts, self.bundles, self._decider, self._helper, self._recipes)
        self.handler = RoundHandler(job, self.session, self.artifacts, self.checkpoints, self._helper) if job else None
        return self.handler

    def _takes_over(self, handler: RoundHandler, state: RoundState) -> bool:
        """Resume a running job from the broker's data; False if these are unusable, and were discarded.

        Raises LostClaim: another reducer goes on, or the broker has lost the job.
        """
        if handler.job.recovery.broker_went_back(state):
            return False
        try:
            handler.resume(state)
        except UNUSABLE as error:
            self._discard_rounds(str(error))
            return False
        handler.save_if_wanted(state)
        return True

    def _open_again(self, error: str) -> bool:
        """Open the job again from its last checkpoint; False if the job is gone. Raises LostClaim."""
        handler = self.handler if self.handler and self.handler.current else self._set_up()
        if handler is None:
            return False
        with contextlib.suppress(OSError):  # the checkpoint being written may be the last
            handler.checkpoints.wait()
        self._discard_rounds(error)
        handler.open()
        return True

    def _discard_rounds(self, error: str) -> None:
        """Discard the broker's data of the job's rounds. Raises LostClaim: another reducer goes on."""
        if not self.session.discard():
            raise LostClaim(f"another reducer goes on: {error}")
        log.error("rounds given up", job=self.session.job_id, error=error)
        self.session.announce("mended", {"error": error})

    def _fold_events(self) -> None:
        """Fold the oldest events, some at a time, if too many wait for an absent control plane."""
        if time.monotonic() < self._fold_at:
            return
        self._fold_at = time.monotonic() + FOLD_S
        if moved := sum(takewhile(bool, (self.session.fold() for _ in range(MOST_FOLDS)))):
            self._remarks.tell(log.info, "events folded", job=self.session.job_id, events=moved)

    def fail(self, error: str, detail: str) -> None:
        """Fail the job: announce the error, one line, and the traceback; end its rounds."""
        if self.session.announce("failed", {"error": error, "detail": detail}):
            self.session.end("failed")

    def _hold(self, error: OSError) -> None:
        """Have the control plane pause the job, whose checkpoint cannot be written; try again in DISK_RETRY_S."""
        self._held_until = time.monotonic() + DISK_RETRY_S
        why = Disk.of(self.artifacts.folder.parent).explained(error)
        reason = f"a checkpoint cannot be written: {why}, then resume the job"
        log.error("held", job=self.session.job_id, reason=reason)
        if not self.session.announce("held", {"reason": reason}):
            raise LostClaim("another reducer has taken over, or the job is gone")

    def is_saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return self.checkpoints.is_writing

    def close(self) -> None:
        """Wait for the checkpoint that is being written."""
        self.checkpoints.close()
        self._helper.shutdown(wait=False)
