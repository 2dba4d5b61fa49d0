"""A replica that begins a unit while the version that its round starts from is still on its way."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from computeshare.jobspec.sampling_plan import Plan
from computeshare.tensors.layout import Layout, Weights
from computeshare.training.work_units import AnyReplica, Compilation, InnerState, Take, Update
from computeshare.types import Vector

Switch = Callable[[int, Callable[[Weights], object], Callable[[], bool]], object]
"""Passes the weights of the version with this number to a function, once they are here; they are valid during the call.
Raises Interrupted: the last argument, `goes_on`, became false, or the version does not come.
"""


class OverlappedReplica:
    """Takes the first `overlap` steps of a unit from where its last unit ended, and the others from the version that
    the unit's round starts from, with what the first steps changed; see `LocalStrategy.overlap`.

    The first steps do not wait for the version, and no sample is lost: the update is that version's weights minus the
    weights at the end. Without a last unit, of this round or the one before, they start from the weights loaded last.
    Their statistics of buffers are dropped for the version's.

    Source: the overlap of Streaming DiLoCo, arXiv:2501.18512, for the whole model, with the steps on the way kept.
    """

    room = None

    def __init__(self, replica: AnyReplica, overlap: int, plan: Plan, layout: Layout, switch: Switch) -> None:
        """`replica` keeps its inner state."""
        self._replica, self._overlap, self._plan, self._layout = replica, overlap, plan, layout
        self._switch = switch
        self._ended: Weights | None = None
        """The weights at the last unit's end."""
        self._round = 0
        """The version that the round of the last unit starts from."""
        self._begun: tuple[int, Update] | None = None
        """A unit and its first steps, in case it is called off while it waits for the version, and computed again."""

    @property
    def kept(self) -> InnerState:
        """As `AnyReplica.kept`."""
        assert self._replica.kept
        return self._replica.kept

    @property
    def compilation(self) -> Compilation:
        """As `AnyReplica.compilation`."""
        return self._replica.compilation

    def prefetch(self, micro_batches: Iterable[int]) -> None:
        """As `AnyReplica.prefetch`."""
        self._replica.prefetch(micro_batches)

    def load(self, weights: Weights) -> None:
        """Load the version before that of the next unit's round. Raises ShapeError."""
        self._replica.load(weights)

    def compute(self, unit: int, goes_on: Callable[[], bool] = lambda: True, take: Take | None = None) -> Update:
        """The steps of the unit with this number; all buckets are ready at the end. Raises Interrupted."""
        steps, version = self._plan.micro_batches(unit), self._plan.round_of(unit)
        first = min(self._overlap, len(steps) - 1)
        change, loss = np.zeros(self._layout.parameters, np.float32), 0.0
        if first:
            begun = self._begin(unit, first, goes_on)
            change, loss = begun.vector, begun.loss
        start = list[Weights]()
        self._switch(version, lambda newest: start.append(_moved(newest, change)), goes_on)
        self._replica.load(start[0])
        update = self.kept.steps(unit, slice(first, len(steps)), goes_on)
        np.subtract(start[0].parameters, update.vector, out=start[0].parameters)
        self._ended, self._round, self._begun = replace(start[0], buffers=update.buffers), version, None
        update.vector[:] += change
        for bucket, where in enumerate(self._layout.buckets if take else ()):
            assert take
            take(bucket, update.vector[where])
        sizes = [sum(map(self._plan.size, part)) for part in (steps[:first], steps[first:])]
        return replace(update, loss=float(np.average([loss, update.loss], weights=sizes)))

    def _begin(self, unit: int, first: int, goes_on: Callable[[], bool]) -> Update:
        """The first steps of the unit with this number."""
        if self._begun is None or self._begun[0] != unit:
            if self._ended and self._plan.round_of(unit) - self._round in (0, 1):
                self._replica.load(self._ended)
            self._begun = unit, self.kept.steps(unit, slice(0, first), goes_on)
        return self._begun[1]


def _moved(weights: Weights, change: Vector) -> Weights:
    """Copies of weights, the parameters minus a change (d,)."""
    return Weights(weights.parameters - change, weights.buffers.copy(), weights.counters.copy())
