"""Runs the migrations: on the engine that the control plane hands over, or on the one of the settings."""

from typing import Any, Literal

from alembic import context
from sqlalchemy import Engine
from sqlmodel import SQLModel
from sqlmodel.sql.sqltypes import AutoString

import api.tables  # noqa: F401 - fills the metadata
from api.database import Database
from computeshare.settings import Settings


def engine() -> Engine:
    """The engine to migrate."""
    given: Engine | None = context.config.attributes.get("engine")
    if given is not None:
        return given
    settings = Settings()
    settings.home.mkdir(parents=True, exist_ok=True)
    return Database(settings.sqlite_url).engine


def plain_text(kind: str, value: Any, _context: Any) -> str | Literal[False]:
    """Write SQLModel's text type as SQLAlchemy's, so that a migration depends on neither's internals."""
    if kind == "type" and isinstance(value, AutoString):
        return f"sa.String({f'length={value.length}' if value.length else ''})"
    return False


def main() -> None:
    """Migrate in one transaction, under the write lock: of two control planes that start, one does it."""
    writer = engine().execution_options(sqlite_begin="BEGIN IMMEDIATE")
    with writer.connect() as connection:
        context.configure(
            connection=connection,
            target_metadata=SQLModel.metadata,
            render_as_batch=True,
            render_item=plain_text,
            transactional_ddl=True,
        )
        with context.begin_transaction():
            context.run_migrations()


if context.is_offline_mode():
    raise SystemExit("migrations need a database: leave out --sql")
main()
