"""Which checkpoints of a running job are removed as newer ones come.

A job keeps its newest ones, the best by accuracy, and every so many versions one for good, as its `keep` says; the last
version always, and what it was forked from. One that is still to be scored waits for its score.
"""

import heapq
from collections import deque

from computeshare.checkpoints.store import Artifacts
from computeshare.jobspec.spec import JobSpec
from computeshare.types import Token

LOOKS = 4
"""Checkpoints looked at for each that is written: more than one, so that those that wait come to an end."""
FEWEST = 2
"""Newest ones that stay while the job runs: one may turn out damaged."""


class Retention:
    """Removes what is no longer kept; what one look costs does not depend on how many checkpoints there are."""

    def __init__(self, artifacts: Artifacts, spec: JobSpec) -> None:
        self._artifacts, self._spec = artifacts, spec
        self._newest: deque[Token] | None = None
        self._overtaken: deque[Token] = deque()
        """To be kept or removed, the oldest first."""
        self._best: list[tuple[float, int, int, Token]] = []
        """A heap of those that are kept for their accuracy; the earlier of two that are alike."""

    def prune(self, token: Token) -> list[Token]:
        """Remove what is not kept any more now that this checkpoint is durable; returns what was removed."""
        if self._newest is None:
            return self._begin()
        if token not in self._newest:
            self._newest.append(token)
        return self._removed(LOOKS)

    def _begin(self) -> list[Token]:
        """Look at all that there is, once: another reducer may have written it, or been killed while it did."""
        self._artifacts.clear_unfinished()
        tokens = self._artifacts.on_disk()  # before the branch: what is none of it now was given up
        branch = self._artifacts.branch()
        given_up = [token for token in tokens if not branch.holds(token)]
        for token in given_up:
            self._artifacts.remove(token)
        counted = (token for token in tokens if branch.holds(token))
        self._newest = deque(token for token in counted if token.incarnation)  # but for what the job was forked from
        return given_up + self._removed(len(tokens))

    def _removed(self, looks: int) -> list[Token]:
        assert self._newest is not None
        keep = self._spec.keep
        last = any(token.version == self._spec.rounds_total for token in self._newest)
        while len(self._newest) > max(keep.last, 1 if last else FEWEST):
            self._overtaken.append(self._newest.popleft())
        removed = []
        for _ in range(min(len(self._overtaken) if last else looks, len(self._overtaken))):
            if loser := self._judged(self._overtaken.popleft()):
                self._artifacts.remove(loser)
                removed.append(loser)
        return removed

    def _judged(self, token: Token) -> Token | None:
        """Which checkpoint goes now that one has been overtaken: this one, one that was the best before, or none."""
        keep = self._spec.keep
        if keep.every and token.version % keep.every == 0:
            return None
        score = self._artifacts.score(token)
        if score is None and self._spec.wants_score(token.version):
            self._overtaken.append(token)
            return None
        if score is None:
            return token
        heapq.heappush(self._best, (float(score["accuracy"]), -token.version, -token.incarnation, token))
        return heapq.heappop(self._best)[-1] if len(self._best) > keep.best else None
