"""The chain of versions that are published as differences from the previous version. Pure.

A chain begins with a snapshot, a version whose whole weights are kept; it may hold a second, newer snapshot.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from computeshare.types import Token

LONGEST = 64
"""Maximum number of differences between two snapshots."""


@dataclass(frozen=True, slots=True)
class Route:
    """Tokens of the snapshot to load first (None: keep the loaded weights) and of the differences to add, in order."""

    snapshot: str | None
    deltas: tuple[str, ...]


def route(chain: Sequence[str], snapshot: str, loaded: str, token: str) -> Route | None:
    """The route from the version `loaded` to the version `token`; None if the chain does not hold `token`.

    Args:
        chain: tokens, oldest first.
        snapshot: token of the newest snapshot.
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
    """Size of the newest snapshot."""
    delta_bytes: int = field(default=0)
    """Total size of the differences since the newest snapshot."""

    @property
    def wants_snapshot(self) -> bool:
        """Whether another snapshot is due: a new worker would read more bytes of differences than of whole weights."""
        return self.delta_bytes >= self.whole_bytes or len(self.tokens) - self.tokens.index(self.snapshot) > LONGEST

    def add(self, token: Token, delta_bytes: int) -> None:
        """Append a version that was published as a difference."""
        self.tokens.append(token)
        self.delta_bytes += delta_bytes

    def renew(self, token: Token, whole_bytes: int) -> None:
        """Make the newest version, also published whole, the snapshot; drop versions before the previous snapshot."""
        self.tokens = self.tokens[self.tokens.index(self.snapshot) :]
        self.snapshot, self.whole_bytes, self.delta_bytes = token, whole_bytes, 0

    def begin_anew(self, whole_bytes: int) -> None:
        """Make the newest version the snapshot: it was published whole some time after its difference."""
        self.snapshot, self.whole_bytes, self.delta_bytes = self.tokens[-1], whole_bytes, 0

    @property
    def outdated(self) -> list[Token]:
        """The tokens that the next `renew` would drop: the versions before the newest snapshot."""
        return self.tokens[: self.tokens.index(self.snapshot)]
