"""Brings SQLite in line with the disk, which holds the truth: adds checkpoints and scores whose events were lost, and
deletes the rows of checkpoints whose files were removed. Gives up rounds in the broker that contradict both.
"""

from pathlib import Path
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update

from api.database import Database, now_ms
from api.projection.events.job_projection import JobProjection
from api.projection.events.versions import add_checkpoint, add_score
from api.projection.rates import JobRates
from api.projection.row_store import is_scored, load_job, store_changes
from api.stored_specs import scored_part
from api.tables import JOB, CheckpointRow, Event, Score, table
from computeshare.checkpoints.store import Artifacts
from computeshare.errors import ArtifactError
from computeshare.protocol.round_store import RoundStore
from computeshare.types import ENDED, Token


def reconcile(database: Database, artifacts_dir: Path, job_id: str) -> None:
    """Bring a job's rows in line with its checkpoint files; does nothing where they agree."""
    artifacts = Artifacts(artifacts_dir, job_id)
    with database.engine.connect() as connection:
        if not any(_differences(connection, artifacts, job_id)):
            return
    with database.writing() as connection:
        gone, news = _differences(connection, artifacts, job_id)
        rows = table(CheckpointRow)
        connection.execute(delete(rows).where(rows.c.job_id == job_id, rows.c.token.in_(gone)))
        state = load_job(connection, job_id)
        if state is None:
            return  # deleted meanwhile
        was, projection, now = state["status"], JobProjection(state, JobRates()), now_ms()
        for token in news:
            if token.version > state["version"]:
                continue  # its events are still to come
            try:
                add_checkpoint(projection, artifacts.manifest(token).model_dump(), now)
            except ArtifactError:
                continue
            if score := artifacts.score(token):
                add_score(projection, {**score, "token": str(token)}, now)
        projection.finish(lambda: is_scored(connection, state, projection.changes))
        store_changes(connection, state, projection.changes, was)


def _differences(connection: Connection, artifacts: Artifacts, job_id: str) -> tuple[set[str], list[Token]]:
    """The tokens of rows whose files are gone, and the checkpoints that SQLite lacks, or lacks a score of."""
    saved, scored = (_known(connection, job_id, model) for model in (CheckpointRow, Score))
    tested = _known(connection, job_id, Score, table(Score).c.tested.is_not(None))
    is_tested = scored_part(connection.scalar(select(JOB.c.spec).where(JOB.c.id == job_id)) or {}) != "test"
    tokens, there = artifacts.tokens(), artifacts.on_disk()  # read last: files exist before their rows
    news = []
    for token in tokens:
        name = str(token)
        if name not in saved:
            news.append(token)
        elif name not in scored or (is_tested and name not in tested):
            score = artifacts.score(token)
            if score is not None and (name not in scored or "test" in score):
                news.append(token)
    return saved - {str(token) for token in there}, news


def _known(connection: Connection, job_id: str, model: type[CheckpointRow | Score], *where: Any) -> set[str]:
    """The tokens that have a row, of those that fulfil `where`."""
    rows = table(model).c
    return set(connection.scalars(select(rows.token).where(rows.job_id == job_id, *where)))


def contradiction(version: int, total: int, status: str | None, saved: int) -> str | None:
    """The contradiction between the rounds of a job that has not ended and its stored state; None without one. Pure.

    Args:
        version: the newest version according to the events, all of which have been read.
        status: the rounds' status; None: they are not open.
        saved: the newest version on disk.
    """
    if status in ENDED:
        return f"its rounds are {status}, though nothing has ended it"
    if status in ("running", "paused") and version >= total:
        return f"version {version} was announced while the rounds before it are {status}"
    if status == "finished" and saved == total > version:
        return f"its rounds are finished and saved, but the last version announced is {version} of {total}"
    return None


def give_up(database: Database, rounds: RoundStore, why: str) -> None:
    """Delete a job's rounds, so that a reducer opens the job again from its last checkpoint and all agree again."""
    event = {"job_id": rounds.job_id, "type": "mended", "at_ms": now_ms(), "data": {"error": why}}
    with database.writing() as connection:
        connection.execute(insert(table(Event)), event)
        mine = JOB.c.id == rounds.job_id
        connection.execute(update(JOB).where(mine).values(revision=JOB.c.revision + 1))
    rounds.reset()
