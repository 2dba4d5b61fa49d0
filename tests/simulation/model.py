"""What a simulated job computes: digests in place of tensors, so that any mixing of branches shows in the last one."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from computeshare.jobspec.sampling_plan import Plan, Round
from computeshare.types import Token

MAGIC = b"UPD"
GARBAGE = b"damaged on its way"
NOT_FINITE = b"NAN"
PLAN = Plan(seed=0, samples=103, micro_batch=10, micro_batches_per_round=4)
"""Rounds of 4, 4 and 3 micro-batches in each epoch."""
ROUNDS = 7


def update(token: str, micro_batch: int) -> bytes:
    """The one right update of a micro-batch on a version."""
    return MAGIC + hashlib.sha256(f"{token}/{micro_batch}".encode()).digest()


@dataclass(frozen=True, slots=True)
class Weights:
    """A version's published weights and the optimizer's state beside them, as digests."""

    weights: bytes
    state: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.weights).hexdigest()

    def step(self, updates: Sequence[bytes]) -> "Weights":
        """The version after this one; both halves depend on everything that went in, and on its order."""
        mixed = b"".join((self.weights, self.state, *updates))
        weights, state = (hashlib.sha256(kind + mixed).hexdigest().encode() for kind in (b"weights", b"state"))
        return Weights(weights, state)

    def dump(self) -> list[bytes]:
        """What is stored as the version's state: all that its reducer holds, as where the codec down is lossy."""
        return [self.state, b"|", self.weights]

    @classmethod
    def parse(cls, stored: bytes) -> "Weights":
        state, _, weights = stored.partition(b"|")
        return cls(weights, state)

    def token(self, incarnation: int, version: int) -> Token:
        return Token(incarnation, version, self.sha256[:16])


INITIAL = Weights(b"weights 0", b"state 0")


def following(version: int, carried: Sequence[int] = (), delay: bool = False) -> Round:
    """The round from `version`; without micro-batches after the last one. With a delay, the next round's are ahead."""
    planned = PLAN.round(version, carried)
    if version >= ROUNDS:
        return Round(version, planned.epoch, planned.first, 0, 0)
    return replace(planned, ahead=following(version + 1).count) if delay else planned


def waits_for_all(version: int) -> bool:
    """Whether the round from `version` may not close early."""
    return PLAN.ends_epoch(version) or version + 1 == ROUNDS


@dataclass(frozen=True, slots=True)
class Version:
    """A version in a reducer's hands: its weights, what is carried into the round that starts from it, and with a delay
    the published weights of the version before; empty: there is none.
    """

    token: Token
    weights: Weights
    carried: tuple[int, ...] = ()
    before: bytes = b""


@dataclass
class Disk:
    """What survives the loss of the broker: checkpoints, and the count of incarnations."""

    incarnation: int = 0
    checkpoints: dict[Token, Version] = field(default_factory=dict)

    def next_incarnation(self) -> int:
        self.incarnation += 1
        return self.incarnation

    def newest(self) -> Version | None:
        """The version to restore; None where nothing was written yet."""
        newest = max(self.checkpoints, key=lambda token: (token.version, token.incarnation), default=None)
        return None if newest is None else self.checkpoints[newest]
