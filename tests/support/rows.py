"""Rows of a table."""

from typing import Any

from sqlalchemy import select

from api.database import Database
from api.tables import table


def rows(database: Database, model: Any) -> list[Any]:
    with database.engine.connect() as connection:
        return list(connection.execute(select(table(model))))
