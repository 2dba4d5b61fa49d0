"""The SQLite file: its tables, its transactions, its beginnings."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx2
import pytest
from alembic import command
from alembic.config import Config
from alembic.operations import Operations
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from api.database import MIGRATIONS, Database
from api.jobs.service import Jobs
from api.tables import Event, Job
from computeshare.jobspec.spec import JobSpec
from computeshare.up.embedded_broker import free_port

SPEC = JobSpec(dataset="digits", model="mlp")


def test_migrations_make_exactly_the_tables_of_the_code(database: Database) -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["engine"] = database.engine
    command.check(config)  # raises where a new migration would be needed


def test_migrating_again_changes_nothing(database: Database, jobs: Jobs) -> None:
    job = jobs.create(SPEC)
    database.migrate()
    assert jobs.show(job.id) == job


def test_a_database_that_others_could_read_is_its_owners_alone_once_it_was_migrated(
    database: Database, jobs: Jobs, tmp_path: Path
) -> None:
    jobs.create(SPEC)
    files = list(tmp_path.glob("computeshare.db*"))
    for file in files:
        file.chmod(0o644)
    database.migrate()
    assert [oct(file.stat().st_mode & 0o777) for file in files] == ["0o600"] * 3


def test_jobs_and_their_history_outlive_every_migration_there_and_back(database: Database, jobs: Jobs) -> None:
    job = jobs.create(SPEC)
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["engine"] = database.engine
    command.downgrade(config, "0001")
    with database.read() as session:
        assert session.execute(text("SELECT COUNT(*) FROM job, event")).scalar_one() == 1
    database.migrate()
    assert jobs.show(job.id) == job


def test_migration_that_is_cut_off_leaves_nothing_half_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = Database(f"sqlite:///{tmp_path}/cut.db")
    create, made = Operations.create_table, []

    def killed_at_the_fifth(self: Operations, name: str, *columns: object, **options: object) -> object:
        made.append(name)
        if len(made) == 5:
            raise KeyboardInterrupt
        return create(self, name, *columns, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Operations, "create_table", killed_at_the_fifth)
        with pytest.raises(KeyboardInterrupt):
            database.migrate()
    assert sqlite3.connect(tmp_path / "cut.db").execute("SELECT name FROM sqlite_master").fetchall() == []
    database.migrate()
    assert Jobs(database, tmp_path).create(SPEC).status == "queued"


def test_connections_are_set_up_for_several_processes(database: Database) -> None:
    with database.engine.connect() as connection:
        values = [
            connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
            for name in ("journal_mode", "busy_timeout", "foreign_keys", "synchronous")
        ]
    assert values == ["wal", 5000, 1, 2]


def test_deleting_a_job_deletes_every_row_of_it(database: Database, jobs: Jobs) -> None:
    job = jobs.create(SPEC).id
    jobs.cancel(job)
    jobs.delete(job)
    with database.read() as session:
        assert session.query(Job).count() == session.query(Event).count() == 0


def test_writers_wait_for_each_other_instead_of_failing(database: Database, jobs: Jobs) -> None:
    """A transaction that reads before it writes would fail at once if it had not taken the write lock first."""
    job = jobs.create(SPEC).id
    failures: list[Exception] = []

    def count_up() -> None:
        try:
            for _ in range(20):
                with database.write() as session:
                    row = session.get(Job, job)
                    assert row is not None
                    row.accepted += 1
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=count_up) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [] and jobs.show(job).accepted == 80


def test_reader_sees_one_moment_while_others_write(database: Database, jobs: Jobs) -> None:
    with database.read() as session:
        before = session.execute(text("SELECT COUNT(*) FROM job")).scalar_one()
        jobs.create(SPEC)
        assert session.execute(text("SELECT COUNT(*) FROM job")).scalar_one() == before


def test_missing_table_is_said(tmp_path: Path) -> None:
    with pytest.raises((OperationalError, sqlite3.OperationalError), match="no such table"):
        Database(f"sqlite:///{tmp_path}/empty.db").check()


def test_control_plane_runs_as_a_module_and_stops_cleanly(tmp_path: Path, redis_url: str) -> None:
    port = free_port()
    settings = {"COMPUTESHARE_HOME": str(tmp_path), "COMPUTESHARE_REDIS_URL": redis_url, "COMPUTESHARE_TOKEN": "secret"}
    command = [sys.executable, "-m", "api", "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(command, env={**os.environ, **settings}, stderr=subprocess.PIPE, text=True)
    try:
        with httpx2.Client(base_url=f"http://localhost:{port}") as http:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and process.poll() is None:
                try:
                    if http.get("/readyz").status_code == 200:
                        break
                except httpx2.TransportError:
                    time.sleep(0.05)
            assert http.get("/v1/jobs", headers={"Authorization": "Bearer secret"}).json()["items"] == []
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=15)
    finally:
        process.kill()
    assert process.returncode in (0, -signal.SIGTERM) and "Traceback" not in errors
