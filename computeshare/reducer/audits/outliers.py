"""Which updates are unlike the others of their round, by their inner products."""

import numpy as np

from computeshare.strategies.averages import Matrix, cosines_of

FAR = 4.0
"""So many times as long as the others, an update is suspected."""
AWAY = -0.2
"""At a lower cosine with the others' mean direction, an update is suspected; honest ones of late rounds are near 0."""


def suspected_in(products: Matrix) -> list[int]:
    """The updates that are unlike the others, by their inner products (n, n); none of fewer than three.

    First those that are more than `FAR` times as long as the median of the others, the longest first; then those that
    point away from the others' mean direction (a cosine below `AWAY`), the most opposed first.
    """
    count, lengths, cosines = len(products), np.sqrt(np.diagonal(products)), cosines_of(products)
    if count < 3:
        return []
    usual = np.array([np.sort(np.delete(lengths, row))[(count - 2) // 2] for row in range(count)])
    long = [int(row) for row in np.argsort(-lengths) if lengths[row] > FAR * usual[row] > 0]
    sums = cosines.sum(axis=1) - np.diagonal(cosines)  # with the sum of the others' directions
    squares = np.array([np.delete(np.delete(cosines, row, 0), row, 1).sum() for row in range(count)])
    agreements = sums / np.sqrt(np.maximum(squares, np.finfo(np.float64).eps))
    away = [int(row) for row in np.argsort(agreements) if agreements[row] < AWAY]
    return [*dict.fromkeys([*long, *away])]
