"""Updates that are turned round or far longer than the others of their round, and honest ones."""

import numpy as np
import pytest

from computeshare.reducer.audits.outliers import suspected_in
from computeshare.strategies.averages import products
from computeshare.types import Vector

RNG = np.random.default_rng(0)


def suspects(*updates: Vector) -> list[int]:
    rows = np.stack(updates)
    cut = rows.shape[1] // 3  # as from two buckets
    return suspected_in(products(rows[:, :cut]) + products(rows[:, cut:]))


@pytest.mark.parametrize("count", [3, 4, 5, 8])
def test_an_update_turned_round_or_far_longer_is_suspected_and_honest_ones_are_not(count: int) -> None:
    updates = [np.float32(1) + RNG.normal(0, 1.5, size=3000).astype(np.float32) for _ in range(count)]
    assert suspects(*updates) == []
    for place, factor in [(0, -1), (count - 1, -3), (1, 5), (2, 1e30), (0, -1e30)]:
        lie = [row * np.float32(factor) if at == place else row for at, row in enumerate(updates)]
        assert suspects(*lie) == [place]
    assert suspects(*(row * np.float32(1e-30 if at else 3.5e-30) for at, row in enumerate(updates))) == []


def test_the_longest_updates_are_suspected_first_and_none_of_two() -> None:
    one = np.ones(100, np.float32)
    assert suspects(one, one * 10, one * 100, -one, one) == [2, 1, 3]
    assert suspects(one, -one, -one * 100, one, one) == [2, 1]
    assert suspects(one, -one) == suspects(one * 100, one) == suspects(one) == []
    assert suspects(one, one * 0, one) == suspects(one * 0, one * 0, one * 0) == []
