"""A job's metrics by version, as Python values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, NamedTuple, Self


class Point(NamedTuple):
    """A series' value for one version, and its time."""

    version: int
    value: float
    at: datetime


Series = tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Metrics:
    """Series by version, ascending. Losses are mean cross-entropy, accuracies fractions, traffic bytes per version. A
    job with a validation split has its versions scored on that, and its best and its last on the test set too.

    Language models have a perplexity instead of an accuracy. `staleness` is the mean age, in versions, of the updates
    in a version; only `async` jobs have it.
    """

    train_loss: Series = ()
    test_loss: Series = ()
    test_accuracy: Series = ()
    perplexity: Series = ()
    samples_per_s: Series = ()
    bytes_up: Series = ()
    bytes_down: Series = ()
    staleness: Series = ()
    validation_loss: Series = ()
    validation_accuracy: Series = ()

    @classmethod
    def of(cls, document: Mapping[str, Sequence[Mapping[str, Any]]]) -> Self:
        """Read the answer of the REST API; series that this release does not know are left out."""
        return cls(**{name: tuple(map(_point, document.get(name, ()))) for name in SERIES})

    def to_dict(self) -> dict[str, dict[int, float]]:
        """Series by name, each a mapping from version to value."""
        return {name: {point.version: point.value for point in getattr(self, name)} for name in SERIES}

    def rows(self) -> list[dict[str, Any]]:
        """One row per version, ascending: `version`, `at` and every series, None where a series has no value.

        `pandas.DataFrame(metrics.rows())` makes a table of them.
        """
        found: dict[int, dict[str, Any]] = {}
        for name in SERIES:
            for version, value, at in getattr(self, name):
                row = found.setdefault(version, {"version": version, "at": at, **dict.fromkeys(SERIES)})
                row[name] = value
        return [found[version] for version in sorted(found)]


SERIES = tuple(field.name for field in fields(Metrics))


def _point(point: Mapping[str, Any]) -> Point:
    return Point(point["version"], point["value"], datetime.fromisoformat(point["at"]))
