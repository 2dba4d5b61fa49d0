"""Writes a running job's checkpoints, one at a time, each with the ledger of the versions before it."""

import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from redis.exceptions import RedisError

from computeshare.checkpoints.retention import Retention
from computeshare.checkpoints.store import Artifacts, CheckpointManifest, Staged
from computeshare.errors import LostClaim
from computeshare.jobspec.sampling_plan import Round
from computeshare.protocol.reducer_session import ReducerSession
from computeshare.protocol.versions.ledger import Entry, lineage
from computeshare.runtime.failpoints import failpoint
from computeshare.tensors.layout import Layout, Weights
from computeshare.types import Blob, Token

CHECKPOINT_S = 30.0
"""A running job is checkpointed at least this often, in seconds."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A version as a checkpoint stores it."""

    token: Token
    weights: Weights
    sha256: str
    """Digest of the weights; empty: not computed yet."""
    state: Sequence[Blob]
    """Parts of `ServerStep.dump`."""
    next_round: Round
    """The round that starts from this version."""
    average: Weights | None = None
    """The moving average up to this version, if the job keeps one."""
    frozen: str = ""
    """Digest of the parameters that are not trained."""
    before: Weights | None = None
    """The version before, if the next round's units are computed on it."""


class Checkpointer:
    """Writes one job's checkpoints in a thread and announces them to the control plane.

    A checkpoint that could not be written is kept in memory until `retry` succeeds.
    """

    def __init__(self, session: ReducerSession, artifacts: Artifacts) -> None:
        self.session, self.artifacts = session, artifacts
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
        """Whether the last checkpoint could not be written, and waits for `retry`."""
        return self._unsaved is not None and self._writing is None

    @property
    def is_due(self) -> bool:
        """Whether the last checkpoint began `CHECKPOINT_S` ago: another is due whatever the job asks for."""
        return not self.is_writing and time.monotonic() - self._begun >= CHECKPOINT_S

    def begin(self, layout: Layout, snapshot: Snapshot, retention: Retention) -> None:
        """Write a checkpoint's data, and let the thread make it durable.

        After a normal return the snapshot is no longer used. After an OSError (no room, or the checkpoint before could
        not be written) it is kept until `retry`: the memory that its weights and state view must not change.

        Args:
            retention: removes outdated checkpoints once this checkpoint is durable.
        """
        self.wait()
        self._begun = time.monotonic()
        self._unsaved = functools.partial(self._stage, layout, snapshot, retention)
        self._unsaved()

    def wait(self) -> None:
        """Wait until the checkpoint being written is durable. Raises OSError: it could not be written; use `retry`."""
        if self._writing:
            writing, self._writing = self._writing, None
            writing.result()
            self._unsaved = None

    def notice(self) -> None:
        """Raise the error of a checkpoint that the thread has finished with; as `wait`, without waiting."""
        if not self.is_writing:
            self.wait()

    def retry(self) -> None:
        """Write the checkpoint that could not be written, and wait for it. Raises OSError."""
        assert self._unsaved is not None
        self._unsaved()
        self.wait()

    def announce(self, manifest: CheckpointManifest) -> bool:
        """Announce a durable checkpoint, for the first time or again; False if another reducer has taken over."""
        event = {"token": manifest.token, "version": manifest.version, "sha256": manifest.sha256}
        return self.session.announce("checkpoint", {**event, "bytes": manifest.bytes, "path": manifest.token})

    def close(self) -> None:
        """Wait for the checkpoint being written; discard a checkpoint that cannot be written."""
        self._disk.shutdown(wait=True)
        if self._staged:
            self._staged.discard()

    def _stage(self, layout: Layout, snapshot: Snapshot, retention: Retention) -> None:
        weights, sha256 = snapshot.weights, snapshot.sha256 or layout.digest(snapshot.weights)
        average, before = (layout.views(one) if one else None for one in (snapshot.average, snapshot.before))
        staged = self.artifacts.stage(snapshot.token, layout.views(weights), snapshot.state, average, before)
        self._staged = staged
        finish = functools.partial(self._finish, staged, sha256, snapshot.next_round, snapshot.frozen, retention)
        self._unsaved = functools.partial(self._submit, finish)
        self._unsaved()

    def _submit(self, finish: Callable[[], None]) -> None:
        self._writing = self._disk.submit(finish)

    def _finish(self, staged: Staged, sha256: str, next_round: Round, frozen: str, retention: Retention) -> None:
        about = (next_round.epoch, next_round.first, next_round.carried)
        try:
            manifest = self.artifacts.seal(staged, sha256, *about, self._ledger(staged.token), frozen)
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
        """Raise LostClaim if the broker has gone back to a version before `token` while the disk was written.

        A broker that is away or empty does not count: the checkpoint on disk is valid all the same.
        """
        try:
            state = self.session.read()
        except RedisError:
            return
        if state and state.token.incarnation == token.incarnation and state.version < token.version:
            raise LostClaim(f"the broker has gone back to version {state.version}, before checkpoint {token}")

    def _ledger(self, token: Token) -> list[Entry]:
        """The ledger's entries for the versions up to `token` that the control plane may not have stored yet.

        Raises LostClaim: the broker has lost the job, and with it some of the entries.
        """
        entries, opened = self.session.history.commits(token.incarnation)
        state = self.session.read()  # read after the commits, so that it proves them complete
        if state is None or state.token.incarnation != token.incarnation or state.version < token.version:
            raise LostClaim(f"the broker has lost what led to version {token}")
        if opened:  # the control plane may not have read the entries in the checkpoint that was restored, either
            before = [saved for saved in self.artifacts.tokens() if saved.version < token.version][-1:]
            entries = [entry for saved in before for entry in self.artifacts.ledger(saved)] + entries
        return lineage(entries, token)
