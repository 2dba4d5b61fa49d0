"""A job's series by version: as points and as columns for plots, both thinned evenly, and complete as CSV."""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import func, select
from sqlalchemy.orm import Session
from sqlmodel import col

from api.database import Database
from api.jobs.service import find
from api.projection import archive
from api.schemas import Metrics, Point
from api.stored_specs import scored_part
from api.tables import Job, LedgerEntry, Score, VersionRow, table
from computeshare.jobspec.tasks.facts import Metric, perplexity
from computeshare.jobspec.tasks.stored import is_language_model
from computeshare.strategies.registry import stored

BY_VERSION = ("train_loss", "samples_per_s", "bytes_up", "bytes_down", "staleness", "consensus")
BY_SCORE = ("test_loss", "test_accuracy", "validation_loss", "validation_accuracy", "perplexity")
CSV_COLUMNS = (
    "version", "at", "train_loss", "test_loss", "test_accuracy", "perplexity", *BY_VERSION[1:], *BY_SCORE[2:4]
)  # fmt: skip
CSV_ROWS = 2000
"""Versions read at a time for the CSV."""
OWN = "own_metrics."
"""Prefix of the columns of a recipe's own metrics."""
DIGITS = 6
CURVE_POINTS = 24
"""Of the small curve beside a job in the list."""


class Lowest(NamedTuple):
    """The version with the lowest test loss, and that loss."""

    version: int
    value: float


T = TypeVar("T")
number = col(VersionRow.version)
Row = dict[str, Any]
Columns = dict[str, list[float | None]]
_VERSION = ("version", "token", "at_ms", "loss", "samples_per_s", "bytes_up", "bytes_down", "consensus")


def metrics(session: Session, job_id: str, since: int, points: int, until: int | None = None) -> Metrics:
    """The job's series: versions above `since`, up to `until`, thinned evenly to about `points` values each. Raises
    NotFound.
    """
    versions, scores = read(session, job_id, since, points, until)
    series = {name: _points(versions, name) for name in BY_VERSION}
    series |= {name: _points(scores, name) for name in BY_SCORE}
    return Metrics(**series, own_metrics=_own_points(scores))


def columns(session: Session, job_id: str, points: int) -> dict[str, Columns]:
    """The series of all versions as columns: `versions` and `scores`, each a dict of lists of equal length; `at` is in
    seconds; own metrics as in the CSV. Raises NotFound.
    """
    versions, scores = read(session, job_id, 0, points)
    own = own_names(session, job_id)
    scored = [row | {f"{OWN}{name}": row["own_metrics"].get(name) for name in own} for row in scores]
    names = [*BY_SCORE, *(f"{OWN}{name}" for name in own)]
    return {"versions": _columns(versions, BY_VERSION), "scores": _columns(scored, names)}


def own_names(session: Session, job_id: str) -> list[str]:
    """The names of a recipe's own metrics. Raises NotFound."""
    return list((find(session, job_id).spec.get("recipe_facts") or {}).get("metrics", []))


def lowest_loss(session: Session, job_id: str) -> Lowest | None:
    """The lowest test loss of all versions that stand; None: no version was scored."""
    loss = col(Score.loss)
    query = select(col(Score.version), loss).where(col(Score.job_id) == job_id, ~col(Score.voided), loss.is_not(None))
    row = session.execute(query.order_by(loss, col(Score.version)).limit(1)).one_or_none()
    return Lowest(row.version, row.loss) if row else None


def curve(session: Session, job_id: str, metric: Metric) -> list[float]:
    """The scores of all versions that stand, ascending, thinned evenly to `CURVE_POINTS`: accuracies or losses."""
    value: Any = col(Score.accuracy) if metric == "accuracy" else col(Score.loss)
    query = select(value).where(col(Score.job_id) == job_id, ~col(Score.voided), value.is_not(None))
    return _thinned([row[0] for row in session.execute(query.order_by(col(Score.version)))], CURVE_POINTS)


def as_csv(database: Database, job_id: str) -> Iterator[str]:
    """Yield CSV: a header, then a line per standing version, ascending; `CSV_ROWS` versions are read at a time."""
    with database.read() as session:
        own = own_names(session, job_id)
    names = [*CSV_COLUMNS, *(f"{OWN}{name}" for name in own)]
    yield _lines([names])
    since = 0
    while True:
        with database.read() as session:
            rows = _page(session, job_id, since)
        if rows:
            yield _lines([[_cell(row, name) for name in names] for row in rows])
        if len(rows) < CSV_ROWS:
            return
        since = int(rows[-1]["version"])


def read(
    session: Session, job_id: str, since: int, points: int, until: int | None = None
) -> tuple[list[Row], list[Row]]:
    """The rows of versions, and of scores, above `since`, up to `until`: about `points` of each. Raises NotFound."""
    job = find(session, job_id)
    last = job.version if until is None else min(until, job.version)
    stride = max(1, -(-(last - since) // points))
    packed = archive.newest(session.connection(), job_id)
    if stride >= archive.SPARSE and since < packed:
        stride, packed = -(-stride // archive.SPARSE) * archive.SPARSE, 0  # the versions that are not packed suffice
    thin = ((number % stride == 0) | (number == last)) & (number <= last)
    scores = session.execute(_scores(job_id).where(col(Score.version) > since, col(Score.version) <= last))
    old, late = _packed(session, job, since, min(last, packed), stride)
    versions = _read(session, job, since, _versions(job_id).where(thin), old, late)
    return versions, _thinned([_scored(row, job.spec) for row in scores], points)


def _page(session: Session, job_id: str, since: int) -> list[Row]:
    """The next `CSV_ROWS` versions after `since`, with their scores."""
    job = find(session, job_id)
    old, late = _packed(session, job, since, since + CSV_ROWS)
    versions = _read(session, job, since, _versions(job_id).limit(CSV_ROWS), old, late)[:CSV_ROWS]
    last = versions[-1]["version"] if versions else since
    scores = _scores(job_id).where(col(Score.version) > since, col(Score.version) <= last)
    scored = {row.version: _scored(row, job.spec) for row in session.execute(scores)}
    return [scored.get(row["version"], {}) | row for row in versions]


def _packed(
    session: Session, job: Job, since: int, last: int, stride: int = 1
) -> tuple[list[SimpleNamespace], dict[str, float]]:
    """The packed versions up to `last` with a number divisible by `stride`, and the version `since`; and the mean
    staleness of their updates by token.
    """
    if last <= since:
        return [], {}
    found, block = archive.standing(session.connection(), job.id, max(1, since), last)
    late: dict[str, list[int]] = {}
    for part in block.ledger:
        late.setdefault(part["token"], []).append(part["staleness"])
    rows = [row for row in found if row.version <= since or row.version % stride == 0]
    return rows, {token: sum(each) / len(each) for token, each in late.items()}


def _read(
    session: Session, job: Job, since: int, query: Any, packed: Sequence[Any], packed_late: dict[str, float]
) -> list[Row]:
    """The versions above `since`, of the query and of `packed`, ascending, with running totals turned into growth."""
    before = _versions(job.id).where(since >= number).order_by(number.desc()).limit(1)
    rows = [*session.execute(before), *session.execute(query.where(since < number).order_by(number))]
    late = packed_late | _staleness(session, job.id, rows) if stored(job.spec).takes_any else {}
    rows = sorted([*rows, *packed], key=lambda row: row.version)
    return [row for row in _grown(rows, late) if row["version"] > since]


def _versions(job_id: str) -> Any:
    columns = (table(VersionRow).c[name] for name in _VERSION)
    return select(*columns).where(col(VersionRow.job_id) == job_id, ~col(VersionRow.voided))


def _scores(job_id: str) -> Any:
    columns = ("version", "at_ms", "loss", "accuracy", "tested", "own_metrics")
    found = select(*(table(Score).c[name] for name in columns))
    return found.where(col(Score.job_id) == job_id, ~col(Score.voided)).order_by(col(Score.version))


def _scored(row: Any, spec: Mapping[str, Any]) -> Row:
    values, part = dict.fromkeys(BY_SCORE), scored_part(spec)
    if row.tested:
        values |= {"test_loss": row.tested["loss"], "test_accuracy": row.tested["accuracy"]}
    values |= {f"{part}_loss": row.loss, f"{part}_accuracy": row.accuracy}
    values["perplexity"] = perplexity(row.loss) if is_language_model(spec) else None
    return {"version": row.version, "at_ms": row.at_ms, "own_metrics": row.own_metrics or {}, **values}


def _grown(rows: Sequence[Any], late: dict[str, float]) -> Iterator[Row]:
    """The versions with `bytes_up` and `bytes_down` per version instead of running totals: the mean growth since the
    row before.
    """
    number, up, down = 0, 0, 0
    for row in rows:
        if (steps := row.version - number) > 0:
            yield {
                "version": row.version,
                "at_ms": row.at_ms,
                "train_loss": row.loss,
                "samples_per_s": row.samples_per_s,
                "bytes_up": (row.bytes_up - up) / steps,
                "bytes_down": (row.bytes_down - down) / steps,
                "staleness": late.get(row.token),
                "consensus": row.consensus,
            }
        number, up, down = row.version, row.bytes_up, row.bytes_down


def _staleness(session: Session, job_id: str, rows: Sequence[Any]) -> dict[str, float]:
    """The mean staleness of each version's updates, by token."""
    token = col(LedgerEntry.token)
    query = select(token, func.avg(col(LedgerEntry.staleness))).where(col(LedgerEntry.job_id) == job_id)
    found = session.execute(query.where(token.in_([row.token for row in rows])).group_by(token))
    return {token: value for token, value in found}  # noqa: C416 - rows are no pairs to mypy


def _thinned(rows: list[T], points: int) -> list[T]:
    """About `points` of the rows, evenly spaced, including the last."""
    return rows[:: -max(1, -(-len(rows) // points))][::-1]


def _points(rows: Iterable[Row], name: str) -> list[Point]:
    found = ((row["version"], row["at_ms"], row[name]) for row in rows)
    return [Point(version=version, at=at, value=value) for version, at, value in found if value is not None]


def _own_points(rows: Iterable[Row]) -> dict[str, list[Point]]:
    """The points of a recipe's own metrics, by name."""
    found: dict[str, list[Point]] = {}
    for row in rows:
        for name, value in row["own_metrics"].items():
            points = found.setdefault(name, [])
            if value is not None:
                points.append(Point(version=row["version"], at=row["at_ms"], value=value))
    return found


def _columns(rows: Sequence[Row], names: Iterable[str]) -> Columns:
    shown = {name: [_short(row[name]) for row in rows] for name in names}
    return {"version": [row["version"] for row in rows], "at": [row["at_ms"] / 1000 for row in rows], **shown}


def _short(value: float | None) -> float | None:
    """Round to `DIGITS` significant digits, enough for a plot."""
    return None if value is None else float(f"{value:.{DIGITS}g}")


def _cell(row: Row, name: str) -> object:
    if name == "at":
        return datetime.fromtimestamp(row["at_ms"] / 1000, UTC).isoformat(timespec="milliseconds")
    if name.startswith(OWN):
        return row.get("own_metrics", {}).get(name.removeprefix(OWN))
    value = row.get(name)
    return round(value) if name in ("bytes_up", "bytes_down") and value is not None else value


def _lines(rows: Iterable[Iterable[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
