"""A job's checkpoints while its rounds go on: written beside them, one at a time, with what led to them."""

import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from redis.exceptions import RedisError

from computeshare.checkpoints.retention import Retention
from computeshare.checkpoints.store import Artifacts, Manifest, Staged
from computeshare.errors import LostClaim
from computeshare.jobspec.sampling_plan import Round
from computeshare.protocol.ledger import Entry, lineage
from computeshare.protocol.reducer_session import Claim
from computeshare.runtime.failpoints import failpoint
from computeshare.tensors.layout import Layout, Weights
from computeshare.types import Blob, Token

CHECKPOINT_S = 30.0
"""A running job is checkpointed at least this often, in seconds."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a checkpoint holds of a version."""

    token: Token
    weights: Weights
    sha256: str
    """The weights' digest; empty: not known."""
    state: Sequence[Blob]
    following: Round


class Checkpointer:
    """Writes one job's checkpoints in a thread of its own, and tells of them."""

    def __init__(self, rounds: Claim, artifacts: Artifacts) -> None:
        self.rounds, self.artifacts = rounds, artifacts
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._writing: Future[None] | None = None
        self._unsaved: Callable[[], None] | None = None
        self._staged: Staged | None = None
        self._begun = time.monotonic()

    @property
    def is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    @property
    def is_stuck(self) -> bool:
        """Whether the last one could not be written, and is kept to be tried again."""
        return self._unsaved is not None and self._writing is None

    @property
    def is_due(self) -> bool:
        """Whether the last one began so long ago that another is due whatever the job asks for."""
        return not self.is_writing and time.monotonic() - self._begun >= CHECKPOINT_S

    def begin(self, layout: Layout, snapshot: Snapshot, retention: Retention) -> None:
        """Write a checkpoint; the disk is waited for beside the rounds. Nothing of the snapshot is held after this.

        Raises OSError: there is no room for it, or the one before could not be written. Then it is held until `retry`:
        what the state is a view of must stay as it is.

        Args:
            retention: removes what is not kept any more once this one is durable.
        """
        self.wait()
        self._begun = time.monotonic()
        self._unsaved = functools.partial(self._stage, layout, snapshot, retention)
        self._unsaved()

    def wait(self) -> None:
        """Until the one that is being written is durable. Raises OSError; it is kept to be tried again."""
        if self._writing:
            writing, self._writing = self._writing, None
            writing.result()
            self._unsaved = None

    def notice(self) -> None:
        """Hear of what became of one that is not being written any more. Raises OSError as `wait`."""
        if not self.is_writing:
            self.wait()

    def retry(self) -> None:
        """Write what could not be written. Raises OSError."""
        assert self._unsaved is not None
        self._unsaved()
        self.wait()

    def announce(self, manifest: Manifest) -> bool:
        """Tell the control plane of a durable checkpoint, which may have been told before; False if another reducer has
        taken over.
        """
        event = {"token": manifest.token, "version": manifest.version, "sha256": manifest.sha256}
        return self.rounds.announce("checkpoint", {**event, "bytes": manifest.bytes, "path": manifest.token})

    def close(self) -> None:
        """Let the one that is being written finish; one that cannot be written is let go of."""
        self._disk.shutdown(wait=True)
        if self._staged:
            self._staged.discard()

    def _stage(self, layout: Layout, snapshot: Snapshot, retention: Retention) -> None:
        weights, sha256 = snapshot.weights, snapshot.sha256 or layout.digest(snapshot.weights)
        staged = self._staged = self.artifacts.stage(snapshot.token, layout.views(weights), snapshot.state)
        finish = functools.partial(self._finish, staged, sha256, snapshot.following, retention)
        self._unsaved = functools.partial(self._submit, finish)
        self._unsaved()

    def _submit(self, finish: Callable[[], None]) -> None:
        self._writing = self._disk.submit(finish)

    def _finish(self, staged: Staged, sha256: str, following: Round, retention: Retention) -> None:
        about = (following.epoch, following.first, following.carried)
        try:
            manifest = self.artifacts.seal(staged, sha256, *about, self._ledger(staged.token))
            self._stands(staged.token)
            self.artifacts.place(staged)
        except (LostClaim, RedisError):
            staged.discard()
            raise
        failpoint("before_announce")
        if not self.announce(manifest):
            raise LostClaim(f"another reducer has taken over, or the job is gone, since version {staged.token}")
        retention.prune(staged.token)

    def _stands(self, token: Token) -> None:
        """Look once more, after the disk was waited for, whether the broker has gone back behind a version.

        Raises LostClaim: it has. One that is away, or was emptied, takes nothing from what is complete on the disk.
        """
        try:
            state = self.rounds.read()
        except RedisError:
            return
        if state and state.token.incarnation == token.incarnation and state.version < token.version:
            raise LostClaim(f"the broker has gone back to version {state.version}, before checkpoint {token}")

    def _ledger(self, token: Token) -> list[Entry]:
        """What led to this version, as far as the control plane may not have stored it yet.

        Raises LostClaim: the broker has lost the job meanwhile, and with it a part of that.
        """
        entries, opened = self.rounds.commits(token.incarnation)
        state = self.rounds.read()  # after what it vouches for
        if state is None or state.token.incarnation != token.incarnation or state.version < token.version:
            raise LostClaim(f"the broker has lost what led to version {token}")
        if opened:  # then it may not have read either what the checkpoint brought that the job was restored from
            before = [saved for saved in self.artifacts.tokens() if saved.version < token.version][-1:]
            entries = [entry for saved in before for entry in self.artifacts.ledger(saved)] + entries
        return lineage(entries, token)
