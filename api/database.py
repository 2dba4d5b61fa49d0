"""The SQLite database: one file in write-ahead-log mode, with one writer at a time."""

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine.interfaces import ExceptionContext
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from computeshare.errors import DatabaseDamaged, DatabaseLost
from computeshare.runtime.database_file import DatabaseFile, is_damage

BUSY_TIMEOUT_MS = 5000
PRAGMAS = (
    "journal_mode=WAL",
    f"busy_timeout={BUSY_TIMEOUT_MS}",
    "foreign_keys=ON",
    "synchronous=FULL",
    "fullfsync=ON",  # macOS alone: its fsync leaves the data in the drive's cache
    "checkpoint_fullfsync=ON",
)
"""SQLite pragmas set on every connection."""
PROBE_S = 1.0
"""Seconds for which the result of a write probe is reused: each probe writes to the disk."""
MIGRATIONS = Path(__file__).parent.parent / "migrations"


def now_ms() -> int:
    """Milliseconds since the epoch by this machine's clock."""
    return time.time_ns() // 1_000_000


class Database:
    """Short transactions on one SQLite file; safe to use from any thread.

    Every use raises DatabaseLost once the file was deleted or replaced, because SQLite would go on writing to the
    deleted file; and DatabaseDamaged if SQLite finds the file corrupt.
    """

    def __init__(self, url: str, backups_dir: Path | None = None) -> None:
        """`url` as in `sqlite:////home/me/computeshare.db`; `migrate` creates the file and its folder.

        `backups_dir`: the folder for copies, by default `backups` beside the file.
        """
        self.url = url
        self.engine = _engine(url)
        path = Path(str(self.engine.url.database))
        self.file = DatabaseFile(path, backups_dir or path.parent / "backups")
        self._identity: tuple[int, int] | None = None
        self._reading = threading.local()
        self._probe = Probe(self._write_something)
        self._guard()
        self._writer = self.engine.execution_options(sqlite_begin="BEGIN IMMEDIATE")

    def migrate(self) -> None:
        """Create the file if it is missing, and migrate its tables to the newest schema."""
        path = self.file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(0o600)
        self._identity = _identity(path)
        for suffix in ("", "-wal", "-shm"):  # they hold secrets, and an earlier release let others read them
            with contextlib.suppress(FileNotFoundError):
                path.with_name(path.name + suffix).chmod(0o600)
        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS))
        config.attributes["engine"] = self.engine
        command.upgrade(config, "head")

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A read transaction with a consistent view. Nested calls on a thread share the outer transaction."""
        if outer := getattr(self._reading, "session", None):
            yield outer
            return
        with Session(self.engine, autoflush=False) as session:
            self._reading.session = session
            try:
                yield session
            finally:
                self._reading.session = None

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A write transaction (BEGIN IMMEDIATE): it holds the write lock from the start, so no other writer changes the
        rows it reads. Raises DatabaseLost after the commit if the file was replaced meanwhile.
        """
        with Session(self._writer) as session, session.begin():
            yield session
        self._require_same_file()

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """As `write`, but with a plain connection instead of an ORM session, for many rows."""
        with self._writer.begin() as connection:
            yield connection
        self._require_same_file()

    def peek(self, statement: str) -> list[Any]:
        """The rows of one statement, without SQLAlchemy's overhead, for callers that ask several times a second."""
        connection = self.engine.raw_connection()
        try:
            cursor = connection.cursor()
            cursor.execute(statement)
            return list(cursor.fetchall())
        except sqlite3.Error as error:
            self._raise_if_damaged(error)
            raise OperationalError(statement, {}, error, hide_parameters=True) from error
        finally:
            connection.close()

    def check(self) -> None:
        """Raise an error if the database cannot be read, or if the last write probe (at most `PROBE_S` old) failed."""
        self.peek("SELECT id FROM job LIMIT 1")
        self._probe.check()

    def _write_something(self) -> None:
        with self.writing() as connection:
            connection.exec_driver_sql("PRAGMA user_version = 1")  # nobody reads it; it is written all the same

    def _guard(self) -> None:
        """Check at every use of a connection that the file was not replaced, and set up each new connection."""

        @event.listens_for(self.engine, "do_connect")
        def _before_connecting(*_: object) -> None:
            self._require_same_file()  # connecting would make a new one

        @event.listens_for(self.engine, "connect")
        def _prepare(connection: Any, _record: object) -> None:
            connection.create_function("casefold", 1, str.casefold, deterministic=True)  # lower() knows ASCII alone
            connection.isolation_level = None  # transactions begin where SQLAlchemy says, not where the driver guesses
            try:
                for pragma in PRAGMAS:
                    connection.execute(f"PRAGMA {pragma}")
            except sqlite3.Error as error:
                self._raise_if_damaged(error)
                raise

        @event.listens_for(self.engine, "checkout")
        def _before_use(*_: object) -> None:
            self._require_same_file()

        @event.listens_for(self.engine, "handle_error")
        def _explain(context: ExceptionContext) -> None:
            self._raise_if_damaged(context.original_exception)

    def _raise_if_damaged(self, error: BaseException) -> None:
        """Raise DatabaseDamaged if this error reports a corrupt file."""
        if is_damage(error):
            raise DatabaseDamaged(f"{self.file.path} is damaged ({error}): {self.file.advice()}") from error

    def _require_same_file(self) -> None:
        """Raise DatabaseLost if the file is not the file that `migrate` opened."""
        if self._identity is not None and _identity(self.file.path) != self._identity:
            text = f"{self.file.path} was deleted or replaced while in use, so nothing can be stored"
            raise DatabaseLost(f"{text}: stop computeshare, {self.file.way_back()}, and start it again")

    def close(self) -> None:
        self.engine.dispose()


class Probe:
    """A health check that runs `action` at most once in `PROBE_S` seconds and repeats its error in between."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self._lock = threading.Lock()
        self._looked_at = float("-inf")
        self._trouble: Exception | None = None

    def check(self) -> None:
        """Raise the action's most recent error, if its most recent run failed."""
        with self._lock:
            if time.monotonic() - self._looked_at > PROBE_S:
                self._trouble = None
                try:
                    self._action()
                except Exception as error:  # kept, and raised for every caller within this second
                    self._trouble = error
                self._looked_at = time.monotonic()
            if self._trouble:
                raise self._trouble


def _identity(path: Path) -> tuple[int, int] | None:
    """The file's device and inode number; None if there is no file. A new file of the same name differs in them."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _engine(url: str) -> Engine:
    engine = create_engine(
        url,
        connect_args={"timeout": BUSY_TIMEOUT_MS / 1000},
        pool_size=20,
        max_overflow=40,
        hide_parameters=True,  # of errors, which are logged: some are secrets
    )

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql(connection.get_execution_options().get("sqlite_begin", "BEGIN"))

    return engine
