"""Layouts: a state dict in flat vectors and back."""

import numpy as np
import pytest

from computeshare.errors import ShapeError
from computeshare.layout import Layout, Weights

LAYOUT = Layout.build(
    iter(
        [
            ("conv.weight", (2, 3), "parameter"),
            ("bn.running_mean", (2,), "buffer"),
            ("bn.num_batches_tracked", (), "counter"),
            ("table.index", (3,), "counter"),
            ("head.bias", (4,), "parameter"),
        ]
    )
)
WEIGHTS = Weights(np.arange(10, dtype=np.float32), np.float32([7, 8]), np.array([5, 0, 1, 2], np.int64))


def test_views_are_the_state_dict_without_copies() -> None:
    views = LAYOUT.views(WEIGHTS)
    assert list(views) == [t.name for t in LAYOUT.tensors]
    assert views["head.bias"].tolist() == [6, 7, 8, 9]
    assert all(view.base is not None for view in views.values())


def test_gathering_the_views_gives_the_weights_back() -> None:
    again = LAYOUT.gather(LAYOUT.views(WEIGHTS))
    assert LAYOUT.digest(again) == LAYOUT.digest(WEIGHTS)
    again.parameters[0] = 99
    assert WEIGHTS.parameters[0] == 0


def test_only_batch_counters_count() -> None:
    assert LAYOUT.counted(WEIGHTS.counters).tolist() == [6, 0, 1, 2]
    assert WEIGHTS.counters.tolist() == [5, 0, 1, 2]


def test_every_value_matters_to_the_digest() -> None:
    for kind, index in [("parameter", 9), ("buffer", 0), ("counter", 3)]:
        changed = WEIGHTS.copy()
        changed.vector(kind)[index] += 1  # type: ignore[arg-type, index, operator]
        assert LAYOUT.digest(changed) != LAYOUT.digest(WEIGHTS)


def test_weights_of_another_layout_are_refused() -> None:
    with pytest.raises(ShapeError, match="do not fit"):
        LAYOUT.digest(Weights(WEIGHTS.parameters[:9], WEIGHTS.buffers, WEIGHTS.counters))
    with pytest.raises(ShapeError, match="not those of this model"):
        LAYOUT.gather({**LAYOUT.views(WEIGHTS), "more": np.zeros(1)})
