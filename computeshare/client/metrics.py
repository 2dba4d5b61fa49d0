"""A job's series as Python values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, NamedTuple, Self


class Point(NamedTuple):
    """A value of a series, of the version that has it."""

    version: int
    value: float
    at: datetime


Series = tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Metrics:
    """Series by version, ascending. Losses are mean cross-entropy, accuracies fractions, traffic bytes a version.

    `staleness` is how many versions late a version's updates were, on average; a job of `async` alone has it.
    """

    train_loss: Series = ()
    test_loss: Series = ()
    test_accuracy: Series = ()
    samples_per_s: Series = ()
    bytes_up: Series = ()
    bytes_down: Series = ()
    staleness: Series = ()

    @classmethod
    def of(cls, document: Mapping[str, Sequence[Mapping[str, Any]]]) -> Self:
        """What the REST API answers; series that this release does not know are left out."""
        return cls(**{name: tuple(map(_point, document.get(name, ()))) for name in SERIES})

    def to_dict(self) -> dict[str, dict[int, float]]:
        """Series by name, each its values by version."""
        return {name: {point.version: point.value for point in getattr(self, name)} for name in SERIES}

    def rows(self) -> list[dict[str, Any]]:
        """A row a version, ascending: `version`, `at` and every series, None where it has no value.

        `pandas.DataFrame(metrics.rows())` is a table of them.
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
