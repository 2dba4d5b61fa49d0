"""The truth is on disk: checkpoints and scores whose events were lost with the broker are taken from their files."""

from pathlib import Path

from sqlalchemy import Connection, select

from api.database import Database, now_ms
from api.services.folding import Fold
from api.services.rates import Rates
from api.services.storing import load, store
from api.tables import CheckpointRow, Score, table
from computeshare.artifacts import Artifacts
from computeshare.errors import ArtifactError
from computeshare.types import Token


def reconcile(database: Database, artifacts_dir: Path, job_id: str) -> None:
    """Bring a job's rows in line with its checkpoint files; does nothing where they agree."""
    artifacts = Artifacts(artifacts_dir, job_id)
    tokens = artifacts.tokens()
    with database.engine.connect() as connection:
        if not _news(connection, artifacts, job_id, tokens):
            return
    with database.writing() as connection:
        state = load(connection, job_id)
        if state is None:
            return  # deleted meanwhile
        was, fold, now = state["status"], Fold(state, Rates()), now_ms()
        for token in _news(connection, artifacts, job_id, tokens):
            if token.version > state["version"]:
                continue  # its events are still to come
            try:
                fold.saved(artifacts.manifest(token).model_dump(), now)
            except ArtifactError:
                continue
            if score := artifacts.score(token):
                fold.rated({**score, "token": str(token)}, now)
        fold.finish()
        store(connection, state, fold.changes, was)


def _news(connection: Connection, artifacts: Artifacts, job_id: str, tokens: list[Token]) -> list[Token]:
    """The checkpoints that SQLite does not know, or knows without their score."""
    saved, scored = (
        set(connection.scalars(select(table(model).c.token).where(table(model).c.job_id == job_id)))
        for model in (CheckpointRow, Score)
    )
    return [t for t in tokens if str(t) not in saved or (str(t) not in scored and artifacts.score(t) is not None)]
