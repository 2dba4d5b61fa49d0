"""The branch of versions that leads to a job's current state. Pure.

Each opening of a job begins an incarnation, at a checkpoint of an earlier incarnation or at the initial weights given
by the seed. Versions that the earlier incarnation made after that checkpoint form an abandoned branch, even if they
reach the disk late.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from computeshare.types import Token

ALL = 10**18
"""Greater than every version number."""


@dataclass(frozen=True, slots=True)
class Branch:
    """The newest incarnation, and the versions of earlier incarnations that it builds on."""

    incarnation: int = 0
    ends: Mapping[int, int] = field(default_factory=dict)
    """For each earlier incarnation on the branch, its last version that is valid."""
    others: int = ALL
    """The last valid version of earlier incarnations without an entry in `ends`; without any record, all are valid."""

    @property
    def start(self) -> int:
        """The version at which the newest incarnation was opened."""
        return max(self.ends.values(), default=0)

    def holds(self, token: Token) -> bool:
        """Whether a version is on the branch."""
        others = ALL if token.incarnation >= self.incarnation else self.others
        return token.version <= self.ends.get(token.incarnation, others)

    def opened(self, incarnation: int, origin: Token | None) -> "Branch":
        """The branch after a new incarnation opens at `origin`, a version on this branch; None: at initial weights."""
        if origin is None:
            return Branch(incarnation, {}, -1)
        ends = {number: end for number, end in self.ends.items() if number < origin.incarnation}
        others = min(self.others, origin.version) if origin.incarnation else -1  # nothing comes before a fork
        return Branch(incarnation, {**ends, origin.incarnation: origin.version}, others)
