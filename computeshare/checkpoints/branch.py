"""Which versions lead to where a job stands. Pure.

Every opening of a job begins an incarnation, at a checkpoint of an earlier one or at the weights that the seed gives.
What the earlier one has made after that checkpoint is a branch that was given up, also if it reaches the disk late.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from computeshare.types import Token

ALL = 10**18
"""Above every version."""


@dataclass(frozen=True, slots=True)
class Branch:
    """The newest incarnation, and the versions before it."""

    incarnation: int = 0
    ends: Mapping[int, int] = field(default_factory=dict)
    """Earlier incarnation to the last version of it that counts."""
    others: int = ALL
    """The same for incarnations without a record: what is not known to be given up counts."""

    @property
    def start(self) -> int:
        """The version at which the newest incarnation was opened."""
        return max(self.ends.values(), default=0)

    def holds(self, token: Token) -> bool:
        """Whether a version belongs to the branch."""
        others = ALL if token.incarnation >= self.incarnation else self.others
        return token.version <= self.ends.get(token.incarnation, others)

    def opened(self, incarnation: int, origin: Token | None) -> "Branch":
        """The branch once a new incarnation is opened at `origin`, a version of this one; None: at the beginning."""
        if origin is None:
            return Branch(incarnation, {}, -1)
        ends = {number: end for number, end in self.ends.items() if number < origin.incarnation}
        others = min(self.others, origin.version) if origin.incarnation else -1  # nothing comes before a fork
        return Branch(incarnation, {**ends, origin.incarnation: origin.version}, others)
