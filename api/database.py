"""The SQLite database: one file, write-ahead log, writers one after the other."""

import contextlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.orm import Session

BUSY_TIMEOUT_MS = 5000
PRAGMAS = (
    "journal_mode=WAL",
    f"busy_timeout={BUSY_TIMEOUT_MS}",
    "foreign_keys=ON",
    "synchronous=FULL",
    "fullfsync=ON",  # macOS alone: its fsync leaves the data in the drive's cache
    "checkpoint_fullfsync=ON",
)
"""Of every connection."""
MIGRATIONS = Path(__file__).parent.parent / "migrations"


def now_ms() -> int:
    """Milliseconds since the epoch by this machine's clock."""
    return time.time_ns() // 1_000_000


class Database:
    """Short transactions on one SQLite file; safe to use from any thread."""

    def __init__(self, url: str) -> None:
        """`url` as in `sqlite:////home/me/computeshare.db`; the file's folder is made if it is missing."""
        self.url = url
        self.engine = _engine(url)
        self._writer = self.engine.execution_options(sqlite_begin="BEGIN IMMEDIATE")

    def migrate(self) -> None:
        """Bring the tables to the newest version."""
        path = Path(str(self.engine.url.database))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(0o600)
        for suffix in ("", "-wal", "-shm"):  # they hold secrets, and an earlier release let others read them
            with contextlib.suppress(FileNotFoundError):
                path.with_name(path.name + suffix).chmod(0o600)
        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS))
        config.attributes["engine"] = self.engine
        command.upgrade(config, "head")

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A consistent view; nothing is written."""
        with Session(self.engine, autoflush=False) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A transaction that holds the write lock from its first statement on: what it reads stays true."""
        with Session(self._writer) as session, session.begin():
            yield session

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """As `write`, without the object-relational layer, for many rows."""
        with self._writer.begin() as connection:
            yield connection

    def peek(self, statement: str) -> list[Any]:
        """Read a few rows with a single statement, for what asks several times a second."""
        connection = self.engine.raw_connection()
        try:
            cursor = connection.cursor()
            cursor.execute(statement)
            return list(cursor.fetchall())
        finally:
            connection.close()

    def check(self) -> None:
        """Raises if the database cannot be read."""
        self.peek("SELECT id FROM job LIMIT 1")

    def close(self) -> None:
        self.engine.dispose()


def _engine(url: str) -> Engine:
    engine = create_engine(
        url,
        connect_args={"timeout": BUSY_TIMEOUT_MS / 1000},
        pool_size=20,
        max_overflow=40,
        hide_parameters=True,  # of errors, which are logged: some are secrets
    )

    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, _record: object) -> None:
        connection.create_function("casefold", 1, str.casefold, deterministic=True)  # lower() knows ASCII alone
        connection.isolation_level = None  # transactions begin where SQLAlchemy says, not where the driver guesses
        for pragma in PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql(connection.get_execution_options().get("sqlite_begin", "BEGIN"))

    return engine
