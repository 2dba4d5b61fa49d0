"""A replica whose model is in a recipe's process."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set

import numpy as np

from computeshare.errors import Interrupted, RecipeError
from computeshare.tensors.layout import Layout, Weights
from computeshare.training.recipe_process import messages
from computeshare.training.recipe_process.connection import ProcessConnection
from computeshare.training.recipe_process.shared_vectors import SharedVectors
from computeshare.training.work_units import Compilation, Take, Update
from computeshare.types import Blob, Precision, Vector

_STATE_BYTES, _STATE_SLACK = 4 * 8, 16 << 20
"""The most bytes of an inner state, for each parameter and beside: no optimizer keeps eight vectors."""


class RecipeReplica:
    """Computes units as `Replica` and `LocalReplica` do, in the recipe's process."""

    def __init__(
        self,
        connection: ProcessConnection,
        shared: SharedVectors,
        layout: Layout,
        steps: Callable[[int], int],
        built: messages.Built,
        measured: Callable[[int], None],
    ) -> None:
        """
        Args:
            steps: the most steps that a unit takes.
            measured: is given the process's peak memory after each unit.
        """
        self._connection, self._shared, self._layout, self._steps = connection, shared, layout, steps
        self._kept, self._measured = built.is_kept, measured
        self._places = {number: shared.update[place] for number, place in enumerate(layout.buckets)}
        self._places[len(layout.buckets)] = shared.new_buffers
        self.compilation = Compilation(built.compiler, built.trouble)

    @property
    def room(self) -> Vector:
        """As `Replica.room`: both processes map it."""
        return self._shared.parameters

    @property
    def kept(self) -> "RecipeReplica | None":
        """The replica itself if it keeps the inner state from unit to unit; else None."""
        return self if self._kept else None

    def load(self, weights: Weights) -> None:
        """Start the following units from `weights`, which are copied. Raises: ShapeError; RecipeError."""
        self._layout.check(weights)
        self._shared.put(weights)
        self._connection.tell(messages.Load())

    def prefetch(self, micro_batches: Iterable[int]) -> None:
        """As `Replica.prefetch`, without waiting for it."""
        self._connection.tell(messages.Prefetch(micro_batches=tuple(micro_batches)))

    def compute(self, unit: int, goes_on: Callable[[], bool] = lambda: True, take: Take | None = None) -> Update:
        """The unit with this number. Raises: Interrupted; RecipeError, and what else the recipe's process raises."""
        return self._compute(messages.Compute(unit=unit, by_bucket=take is not None), goes_on, take)

    def steps(self, unit: int, part: slice, goes_on: Callable[[], bool] = lambda: True) -> Update:
        """As `LocalReplica.steps`."""
        start, stop, _ = part.indices(self._steps(unit))
        return self._compute(messages.Compute(unit=unit, by_bucket=False, part=(start, stop)), goes_on)

    def _compute(self, request: messages.Compute, goes_on: Callable[[], bool], take: Take | None = None) -> Update:
        if not goes_on():
            raise Interrupted("the work was called off")
        shared, buffers = self._shared, len(self._layout.buckets)
        buckets = SharedBuckets(self._places, take, {buffers}) if take else None
        steps = self._steps(request.unit)
        told, _ = self._connection.ask(
            request, messages.Computed, steps=steps, tick=shared.begin(goes_on), take=buckets.taken if buckets else None
        )
        if buckets:
            buckets.check()
        self._measured(told.peak_bytes)
        vector = np.empty(0, np.float32) if take else shared.update.copy()
        return Update(vector, shared.new_buffers.copy(), told.loss)

    def dump(self) -> list[Blob] | None:
        """As `LocalReplica.dump`."""
        most = _STATE_BYTES * self._layout.parameters + _STATE_SLACK
        told, body = self._connection.ask(messages.Dump(), messages.State, most_body=most)
        return [body] if told.is_there else None

    def restore(self, state: Blob) -> None:
        """As `LocalReplica.restore`."""
        self._connection.ask(messages.Restore(), messages.Done, body=[state])


def walk(
    connection: ProcessConnection, shared: SharedVectors, micro_batches: Sequence[int], precision: Precision
) -> Update:
    """Compute micro-batches with the trial's model in a precision."""
    request = messages.Walk(precision=precision, micro_batches=tuple(micro_batches))
    told, _ = connection.ask(request, messages.Computed, steps=len(micro_batches))
    return Update(shared.update.copy(), shared.new_buffers.copy(), told.loss)


class SharedBuckets:
    """Passes on buckets from shared memory, each once, as copies."""

    def __init__(self, places: Mapping[int, Vector], take: Take, optional: Set[int] = frozenset()) -> None:
        """`places`: in shared memory, by their numbers; `optional`: the numbers of those that may be left out."""
        self._places, self._take, self._optional = places, take, optional
        self._left = set(places)

    def taken(self, number: int) -> None:
        if number not in self._left:
            raise RecipeError(
                f"the recipe's process sent bucket {number} twice, or the model has no such bucket: it is broken"
            )
        self._left.remove(number)
        self._take(number, self._places[number].copy())

    def check(self) -> None:
        if missing := self._left - self._optional:
            raise RecipeError(f"the recipe's process left out bucket {min(missing)}: it is broken")
