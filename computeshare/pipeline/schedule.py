"""The order in which a worker computes the pieces of a micro-batch on its stages. Pure.

A stage takes the pieces in ascending order, forward and backward, in each schedule: buffers and gradients are the same
bits whatever the schedule, and whoever holds which stages. A worker is ahead of
the workers after it, so that no two wait for each other.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["gpipe", "1f1b"]


@dataclass(frozen=True, slots=True)
class Operation:
    """A forward or backward pass of one piece through one stage."""

    direction: Literal["forward", "backward"]
    stage: int
    piece: int


def operations(kind: Kind, held: range, stages: int, pieces: int) -> list[Operation]:
    """The operations on a micro-batch by a worker that holds consecutive stages, in order.

    `gpipe` (arXiv:1811.06965) computes all pieces forward, then all backward: a stage keeps the activations of all
    pieces. `1f1b` (PipeDream-Flush, arXiv:2104.04473) computes a piece backward as soon as later stages can have done
    so: a stage keeps one piece more than there are stages after the worker's.

    Args:
        held: numbers of the worker's stages.
        stages: of the whole model.
    """
    ahead = pieces if kind == "gpipe" else min(stages - held.stop, pieces)
    return [*_ordered(held, pieces, ahead)]


def _ordered(held: range, pieces: int, ahead: int) -> Iterator[Operation]:
    for step in range(pieces + ahead):
        if step < pieces:
            yield from (Operation("forward", stage, step) for stage in held)
        if step >= ahead:
            yield from (Operation("backward", stage, step - ahead) for stage in reversed(held))


def most_in_flight(kind: Kind, held: range, stages: int, pieces: int) -> int:
    """The most pieces whose activations a worker with these stages keeps at once, as `operations`."""
    return pieces if kind == "gpipe" else min(stages - held.stop + 1, pieces)
