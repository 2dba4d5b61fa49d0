"""How versions follow one another where each is published as its difference from the one before. Pure.

A chain begins with a version whose whole weights are kept, a snapshot; another snapshot, further on, is the newest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from computeshare.types import Token

LONGEST = 64
"""Differences after which another snapshot is published, however small they are."""


@dataclass(frozen=True, slots=True)
class Route:
    """The whole weights to begin with (none: those at hand), and the differences to add to them, in order."""

    snapshot: str | None
    deltas: tuple[str, ...]


def route(chain: Sequence[str], snapshot: str, loaded: str, token: str) -> Route | None:
    """From the version `loaded` to the version `token`; None if the chain has no such version (any more).

    Args:
        chain: tokens, oldest first.
        snapshot: the newest of them whose whole weights are there.
    """
    if token not in chain or snapshot not in chain:
        return None
    end = chain.index(token)
    if loaded in chain[: end + 1]:
        return Route(None, tuple(chain[chain.index(loaded) + 1 : end + 1]))
    begin = chain.index(snapshot)
    begin = begin if begin <= end else 0
    return Route(chain[begin], tuple(chain[begin + 1 : end + 1]))


@dataclass(slots=True)
class Chain:
    """A reducer's view of its job's chain."""

    tokens: list[Token]
    snapshot: Token
    whole_bytes: int
    """Of the newest snapshot."""
    delta_bytes: int = field(default=0)
    """Of the differences since then."""

    @property
    def wants_snapshot(self) -> bool:
        """Whether a newcomer would read more differences than whole weights."""
        return self.delta_bytes >= self.whole_bytes or len(self.tokens) - self.tokens.index(self.snapshot) > LONGEST

    def add(self, token: Token, delta_bytes: int) -> None:
        """A version was published as a difference."""
        self.tokens.append(token)
        self.delta_bytes += delta_bytes

    def renew(self, token: Token, whole_bytes: int) -> None:
        """The newest version was published whole, too: what lies before the last snapshot is let go."""
        self.tokens = self.tokens[self.tokens.index(self.snapshot) :]
        self.snapshot, self.whole_bytes, self.delta_bytes = token, whole_bytes, 0

    def begin_anew(self, whole_bytes: int) -> None:
        """The newest version was published whole a while after it was published as a difference."""
        self.snapshot, self.whole_bytes, self.delta_bytes = self.tokens[-1], whole_bytes, 0

    @property
    def outdated(self) -> list[Token]:
        """The tokens that `renew` lets go of, if it is called next: those before the newest snapshot."""
        return self.tokens[: self.tokens.index(self.snapshot)]
