"""The removal of a running job's superseded checkpoints.

A job keeps its newest checkpoints, the best, and every so many versions a checkpoint for good, as its `keep` says;
also its last version, and the checkpoint that it was forked from. A checkpoint that waits for its score is kept
until it is scored; one that an evaluator could not read gets no score. A job that may stop early also keeps each
checkpoint until all before it are scored, and from the version with which it stops on, all checkpoints: the version
must not depend on the order in which scores come.
"""

import heapq
from collections import deque
from typing import Any

from computeshare.checkpoints.store import Artifacts
from computeshare.jobspec.spec import JobSpec
from computeshare.jobspec.tasks.facts import goodness
from computeshare.types import Token

LOOKS = 4
"""Superseded checkpoints examined per new checkpoint: more than one, so that a backlog shrinks."""
FEWEST = 2
"""Newest checkpoints kept while the job runs, since one may turn out damaged."""


class Retention:
    """Removes superseded checkpoints; the cost of examining a checkpoint does not depend on their number."""

    def __init__(self, artifacts: Artifacts, spec: JobSpec) -> None:
        self._artifacts, self._spec = artifacts, spec
        self._newest: deque[Token] | None = None
        self._overtaken: deque[Token] = deque()
        """Superseded by newer checkpoints, not yet judged; oldest first."""
        self._best: list[tuple[float, int, int, Token]] = []
        """A heap of the checkpoints kept for their goodness; of equally good ones the earlier version ranks higher."""
        self._leader: dict[int, dict[str, Any]] = {}
        """The best score so far by its version, in a job that may stop early."""
        self._has_stopped = False

    def prune(self, token: Token) -> list[Token]:
        """Remove superseded checkpoints now that checkpoint `token` is durable; returns the removed ones' tokens."""
        if self._newest is None:
            return self._begin()
        if token not in self._newest:
            self._newest.append(token)
        return self._removed(LOOKS)

    def _begin(self) -> list[Token]:
        """Examine all checkpoints once: another reducer may have written them, or been killed while writing."""
        self._artifacts.clear_unfinished()
        tokens = self._artifacts.on_disk()  # listed before the branch is read: checkpoints outside it are abandoned
        branch = self._artifacts.branch()
        given_up = [token for token in tokens if not branch.holds(token)]
        for token in given_up:
            self._artifacts.remove(token)
        counted = (token for token in tokens if branch.holds(token))
        self._newest = deque(token for token in counted if token.incarnation)  # 0: the fork's origin
        return given_up + self._removed(len(tokens))

    def _removed(self, looks: int) -> list[Token]:
        assert self._newest is not None
        keep = self._spec.keep
        last = any(token.version == self._spec.rounds_total for token in self._newest)
        while len(self._newest) > max(keep.last, 1 if last else FEWEST):
            self._overtaken.append(self._newest.popleft())
        removed = []
        for _ in range(min(len(self._overtaken) if last else looks, len(self._overtaken))):
            if self._must_wait(self._overtaken[0]):
                break
            if loser := self._judged(self._overtaken.popleft()):
                self._artifacts.remove(loser)
                removed.append(loser)
        return removed

    def _must_wait(self, token: Token) -> bool:
        """Whether early stopping still needs this checkpoint and those after it."""
        stop = self._spec.stop
        if stop is None or self._has_stopped or not self._spec.wants_score(token.version):
            return self._has_stopped
        score = self._artifacts.score(token)
        if score is None:
            return not self._artifacts.is_damaged(token)
        self._has_stopped = stop.decide(self._leader | {token.version: score}, self._spec.evaluate_every) is not None
        if not self._leader or goodness(score) > max(map(goodness, self._leader.values())):
            self._leader = {token.version: score}
        return self._has_stopped

    def _judged(self, token: Token) -> Token | None:
        """The checkpoint to remove in favour of newer ones: `token`, a former best, or none."""
        keep = self._spec.keep
        if keep.every and token.version % keep.every == 0:
            return None
        score = self._artifacts.score(token)
        wants = self._spec.wants_score(token.version)
        if score is None and wants and not self._artifacts.is_damaged(token):
            self._overtaken.append(token)
            return None
        if score is None:
            return token
        heapq.heappush(self._best, (goodness(score), -token.version, -token.incarnation, token))
        return heapq.heappop(self._best)[-1] if len(self._best) > keep.best else None
