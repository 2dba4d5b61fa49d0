"""Where to cut a model, so that its stages ask about as much of their workers. Pure."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segment:
    """The section of a model between two neighbouring places where the model can be cut.

    Attributes:
        work: operations, or seconds, of its forward pass; any unit, the same for all segments.
        memory: bytes of its parameters, their gradients and what it keeps for the backward pass.
        border: bytes of all values that cross its beginning.
        weights: bytes of its parameters alone; a stage without any would have nothing to train.
    """

    work: float
    memory: float
    border: float = 0.0
    weights: float = 1.0


def shares(segments: Sequence[Segment]) -> list[float]:
    """Each segment's share of the model's work plus its share of the memory; all of them add up to 2."""
    work, memory = sum(one.work for one in segments) or 1.0, sum(one.memory for one in segments) or 1.0
    return [one.work / work + one.memory / memory for one in segments]


def balanced(segments: Sequence[Segment], stages: int) -> list[int]:
    """The numbers of the segments with which the second and each later stage begins, ascending.

    Each stage has weights, and the largest stage's share is the least possible; of several such ways, one with little
    data across the borders. The same segments always give the same answer.

    Raises ValueError: there are fewer segments with weights than stages.
    """
    count, weighty = len(segments), sum(one.weights > 0 for one in segments)
    if weighty < stages:
        raise ValueError(f"{weighty} segments with weights do not make {stages} stages")
    weights = [0.0, *itertools.accumulate(one.weights for one in segments)]
    before = [0.0]
    for share in shares(segments):
        before.append(before[-1] + share)
    best = [
        (before[stop] if weights[stop] else math.inf, 0.0) for stop in range(count + 1)
    ]  # of segments up to `stop` in one stage
    choices: list[list[int]] = []
    for stage in range(1, stages):
        following, chosen = [(math.inf, math.inf)] * (count + 1), [0] * (count + 1)
        for stop in range(stage + 1, count + 1):
            for start in range(stage, stop):
                if weights[start] == weights[stop]:
                    break
                largest, crossing = best[start]
                found = (max(largest, before[stop] - before[start]), crossing + segments[start].border)
                if found < following[stop]:
                    following[stop], chosen[stop] = found, start
        best = following
        choices.append(chosen)
    starts, stop = [], count
    for chosen in reversed(choices):
        stop = chosen[stop]
        starts.append(stop)
    return starts[::-1]
