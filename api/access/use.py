"""Whether a token or a link is valid, and when it was last used."""

import contextlib
from typing import Any

from sqlalchemy import ColumnElement, Table, func, select
from sqlalchemy.exc import OperationalError

from api.database import Database, now_ms

NOTED_MS = 60_000
"""How often at most a use is stored."""


def is_valid(credential: Table) -> ColumnElement[bool]:
    """The rows that have not expired."""
    return credential.c.expires_ms.is_(None) | (credential.c.expires_ms > now_ms())


def is_held(database: Database, credential: Table, row_id: str | None) -> bool:
    """Whether the token or the link with this id has neither expired nor been revoked."""
    query = select(func.count()).where(credential.c.id == row_id, is_valid(credential))
    with database.engine.connect() as connection:
        return bool(connection.execute(query).scalar_one())


def note_use(database: Database, credential: Table, row: Any) -> None:
    """Store that a token or a link was used now, unless that was done within the last minute."""
    now = now_ms()
    if row.used_ms is not None and row.used_ms > now - NOTED_MS:
        return
    with contextlib.suppress(OperationalError), database.writing() as connection:  # busy: the next use is stored
        connection.execute(credential.update().where(credential.c.id == row.id).values(used_ms=now))
