"""Memory that two processes share keeps its size."""

import os
import sys

import numpy as np
import pytest

from computeshare.tensors.layout import Layout, Weights
from computeshare.training.recipe_process.shared_vectors import SharedVectors, allocate

LAYOUT = Layout.build(iter([("w", (5,), "parameter"), ("mean", (3,), "buffer"), ("count", (), "counter")]))


def test_both_sides_see_the_same_vectors() -> None:
    descriptor = allocate(LAYOUT)
    mine, theirs = SharedVectors(descriptor, LAYOUT), SharedVectors(os.dup(descriptor), LAYOUT)
    weights = Weights(np.arange(5, dtype=np.float32), np.ones(3, np.float32), np.array([7]))
    mine.put(weights)
    assert LAYOUT.digest(theirs.weights) == LAYOUT.digest(weights)
    theirs.update[:], theirs.new_buffers[:], mine.is_called_off = 2, 3, True
    assert (mine.update.tolist(), mine.new_buffers.tolist(), theirs.is_called_off) == ([2.0] * 5, [3.0] * 3, True)
    assert LAYOUT.digest(mine.weights) == LAYOUT.digest(weights), "they do not overlap"


def test_a_layout_without_buffers_is_shared_too() -> None:
    layout = Layout.build(iter([("w", (5,), "parameter")]))
    shared = SharedVectors(allocate(layout), layout)
    assert (len(shared.buffers), len(shared.counters), len(shared.new_buffers)) == (0, 0, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="there it cannot be changed at all")
def test_the_other_side_cannot_cut_the_memory() -> None:
    descriptor = allocate(LAYOUT)
    for size in (0, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
