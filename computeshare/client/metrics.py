"""A job's metrics by version, as Python values."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
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
    in a version; only `async` and `gossip` jobs have it. `consensus` is the root mean square of the distance between
    workers' own weights and their mean; only `gossip` jobs have it.
    """

    train_loss: Series = ()
    test_loss: Series = ()
    test_accuracy: Series = ()
    perplexity: Series = ()
    samples_per_s: Series = ()
    bytes_up: Series = ()
    bytes_down: Series = ()
    staleness: Series = ()
    consensus: Series = ()
    validation_loss: Series = ()
    validation_accuracy: Series = ()
    own_metrics: Mapping[str, Series] = field(default_factory=dict)
    """Those of a recipe, by name, on the same split as the others."""

    @classmethod
    def of(cls, document: Mapping[str, Sequence[Mapping[str, Any]]]) -> Self:
        """Read the answer of the REST API; series that this release does not know are left out."""
        own: Any = document.get("own_metrics", {})
        return cls(
            **{name: _series(document.get(name, ())) for name in SERIES},
            own_metrics={name: _series(points) for name, points in own.items()},
        )

    def to_dict(self) -> dict[str, dict[int, float]]:
        """Series by name, each a mapping from version to value; own metrics as `own_metrics.NAME`."""
        return {name: {point.version: point.value for point in series} for name, series in self._all()}

    def rows(self) -> list[dict[str, Any]]:
        """One row per version, ascending: `version`, `at` and every series (own metrics as `own_metrics.NAME`), None
        where a series has no value.

        `pandas.DataFrame(metrics.rows())` makes a table of them.
        """
        found: dict[int, dict[str, Any]] = {}
        blank = dict.fromkeys(name for name, _ in self._all())
        for name, series in self._all():
            for version, value, at in series:
                row = found.setdefault(version, {"version": version, "at": at, **blank})
                row[name] = value
        return [found[version] for version in sorted(found)]

    def _all(self) -> list[tuple[str, Series]]:
        own = ((f"own_metrics.{name}", series) for name, series in self.own_metrics.items())
        return [*((name, getattr(self, name)) for name in SERIES), *own]


SERIES = tuple(one.name for one in fields(Metrics) if one.name != "own_metrics")


def _series(points: Iterable[Mapping[str, Any]]) -> Series:
    return tuple(map(_point, points))


def _point(point: Mapping[str, Any]) -> Point:
    return Point(point["version"], point["value"], datetime.fromisoformat(point["at"]))
