"""The truth is on disk: checkpoints and scores whose events were lost are taken from their files, and those whose files
were removed, as newer ones came, are forgotten.
"""

from pathlib import Path

from sqlalchemy import Connection, delete, select

from api.database import Database, now_ms
from api.services.folding import Fold
from api.services.rates import Rates
from api.services.storing import is_scored, load, store
from api.tables import CheckpointRow, Score, table
from computeshare.artifacts import Artifacts
from computeshare.errors import ArtifactError
from computeshare.types import Token


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
        state = load(connection, job_id)
        if state is None:
            return  # deleted meanwhile
        was, fold, now = state["status"], Fold(state, Rates()), now_ms()
        for token in news:
            if token.version > state["version"]:
                continue  # its events are still to come
            try:
                fold.saved(artifacts.manifest(token).model_dump(), now)
            except ArtifactError:
                continue
            if score := artifacts.score(token):
                fold.rated({**score, "token": str(token)}, now)
        fold.finish(lambda: is_scored(connection, state, fold.changes))
        store(connection, state, fold.changes, was)


def _differences(connection: Connection, artifacts: Artifacts, job_id: str) -> tuple[set[str], list[Token]]:
    """The tokens of rows whose files are gone; the checkpoints that SQLite does not know, or not with their score."""
    saved, scored = (_known(connection, job_id, model) for model in (CheckpointRow, Score))
    tokens, there = artifacts.tokens(), artifacts.on_disk()  # looked at last: files are there before their rows
    news = [t for t in tokens if str(t) not in saved or (str(t) not in scored and artifacts.score(t) is not None)]
    return saved - {str(token) for token in there}, news


def _known(connection: Connection, job_id: str, model: type[CheckpointRow | Score]) -> set[str]:
    """The tokens that there are rows for."""
    rows = table(model).c
    return set(connection.scalars(select(rows.token).where(rows.job_id == job_id)))
