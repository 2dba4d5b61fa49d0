"""The table behind the plots."""

from datetime import UTC, datetime

from api.pages.views import TABLE_POINTS, Row, rows
from api.schemas import Metrics, Point


def metrics(train: int, scored_every: int) -> Metrics:
    """A job of `train` versions whose losses are its versions' numbers."""
    at = datetime.now(UTC)
    series = [Point(version=v, value=float(v), at=at) for v in range(1, train + 1)]
    scored = [point for point in series if point.version % scored_every == 0]
    given = {"train_loss": series, "test_loss": scored, "test_accuracy": scored}
    return Metrics(
        **{name: given.get(name, []) for name in Metrics.model_fields if name != "own_metrics"}, own_metrics={}
    )


def test_each_version_is_one_row_and_the_newest_comes_first() -> None:
    assert rows(metrics(3, 2)) == [Row(3, 3.0, None, None), Row(2, 2.0, 2.0, 2.0), Row(1, 1.0, None, None)]


def test_a_long_job_keeps_a_short_table_of_its_scored_versions() -> None:
    found = rows(metrics(10_000, 20))
    assert len(found) <= TABLE_POINTS
    assert found[0].version == 10_000
    assert all(row.test_accuracy is not None for row in found)


def test_a_job_that_is_seldom_scored_shows_other_versions_too() -> None:
    found = rows(metrics(1000, 500))
    assert {1000, 500} < {row.version for row in found}
    assert TABLE_POINTS // 2 < len(found) <= 2 * TABLE_POINTS


def test_scores_on_a_validation_split_are_rows_too() -> None:
    of_test = metrics(40, 20)
    held = of_test.model_copy(update={"validation_loss": of_test.test_loss, "test_loss": [], "test_accuracy": []})
    found = {row.version: row for row in rows(held)}
    assert (found[20].validation_loss, found[20].test_loss, found[19].validation_loss) == (20.0, None, None)


def test_a_recipes_own_metrics_are_in_the_rows_of_their_versions() -> None:
    found = metrics(3, 2)
    of_two = found.model_copy(update={"own_metrics": {"f1": found.test_loss[:1]}})
    assert [dict(row.own) for row in rows(of_two)] == [{}, {"f1": 2.0}, {}]
