"""Counts of a classifier's scored samples by class, for precision, recall and F1. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

MOST_IN_MATRIX = 100
"""The most classes that have a confusion matrix; of more, the most confused pairs tell enough, and are small."""
MOST_PAIRS = 100


@dataclass(frozen=True, slots=True)
class ClassMetrics:
    """Precision, recall and F1 of a class, as fractions, and its number of samples.

    `precision` is None for a class that no sample was given, `recall` for one without samples, `f1` where both are so.
    """

    precision: float | None
    recall: float | None
    f1: float | None
    support: int


class ClassCounts(BaseModel):
    """The counts of the samples of a split, as `classes.json` holds them; each list is in the order of the classes.

    `support` counts samples by true class, `predicted` by the class that they were given, `correct` those where both
    are the same. `confusion[i][j]` counts samples of class i that were given class j; None with too many classes.
    `confused` has the most frequent mistakes as (true class, class given, samples), the most frequent first.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    names: tuple[str, ...] | None
    support: tuple[int, ...]
    predicted: tuple[int, ...]
    correct: tuple[int, ...]
    confusion: tuple[tuple[int, ...], ...] | None
    confused: tuple[tuple[int, int, int], ...]

    @property
    def metrics(self) -> list[ClassMetrics]:
        """Each class's metrics."""
        counts = zip(self.correct, self.predicted, self.support, strict=True)
        return [
            ClassMetrics(_share(right, given), _share(right, true), _share(2 * right, given + true), true)
            for right, given, true in counts
        ]


def count_classes(
    classes: npt.NDArray[np.int64], predicted: npt.NDArray[np.int64], number: int, names: Sequence[str] | None
) -> ClassCounts:
    """Count samples by their true classes (n,) and the classes that they were given (n,), of `number` classes."""
    pairs, times = np.unique(classes * number + predicted, return_counts=True)
    true, given = np.divmod(pairs, number)
    confusion = None
    if number <= MOST_IN_MATRIX:
        confusion = np.zeros((number, number), np.int64)
        confusion[true, given] = times
    wrong = np.flatnonzero(true != given)
    worst = wrong[np.argsort(-times[wrong], kind="stable")][:MOST_PAIRS]
    return ClassCounts(
        names=tuple(names) if names else None,
        support=np.bincount(classes, minlength=number).tolist(),
        predicted=np.bincount(predicted, minlength=number).tolist(),
        correct=np.bincount(classes[classes == predicted], minlength=number).tolist(),
        confusion=None if confusion is None else confusion.tolist(),
        confused=[(int(true[i]), int(given[i]), int(times[i])) for i in worst],
    )


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
