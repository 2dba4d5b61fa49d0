"""`computeshare up` and `doctor` where the database is damaged."""

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from api.database import Database
from api.jobs.service import Jobs
from computeshare.jobspec.spec import JobSpec
from computeshare.up.embedded_broker import free_port
from tests.support.control_plane import control_plane

pytestmark = [pytest.mark.e2e, pytest.mark.long]
PATIENCE_S = 10.0


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with a database of some hundred pages and a copy of it; nothing runs there."""
    database = Database(f"sqlite:///{tmp_path / 'computeshare.db'}")
    database.migrate()
    jobs = Jobs(database, tmp_path / "artifacts")
    for number in range(200):
        jobs.create(JobSpec(dataset="digits", model="mlp", name=f"job {number}"))
    database.file.copy(time.time())
    database.close()
    return tmp_path


def damage_every_third_page(path: Path) -> None:
    with open(path, "r+b") as file:
        for page in range(2, path.stat().st_size // 4096, 3):
            file.seek(4096 * page)
            file.write(os.urandom(4096))


def write_no_database(path: Path) -> None:
    path.write_bytes(os.urandom(40_960))


def computeshare(home: Path, *arguments: str, within_s: float) -> tuple[int, str, float]:
    """Exit code, output and seconds of a command that is to end in this time."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COMPUTESHARE_")}
    environment["COMPUTESHARE_HOME"] = str(home)
    command, started = [sys.executable, "-m", "computeshare.cli.main", *arguments], time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=within_s, check=False)
    return done.returncode, done.stdout + done.stderr, time.monotonic() - started


@pytest.mark.parametrize("damage", [damage_every_third_page, write_no_database])
def test_up_ends_with_the_cause_and_the_copy_to_restore_and_starts_once_it_is_restored(
    home: Path, damage: Callable[[Path], None]
) -> None:
    (copy,) = (home / "backups").iterdir()
    damage(home / "computeshare.db")
    _, _, loading_s = computeshare(home, "down", within_s=60)  # as long as this machine takes to load the modules
    code, output, seconds = computeshare(home, "up", "--port", str(free_port()), within_s=60)
    assert code != 0 and seconds < PATIENCE_S + loading_s
    assert f"{home / 'computeshare.db'} is damaged" in output and f"cp {copy} {home / 'computeshare.db'}" in output
    assert "Traceback" not in output and not (home / "logs").exists()
    code, output, _ = computeshare(home, "doctor", "--json", within_s=240)
    (check,) = [check for check in json.loads(output)["checks"] if check["name"] == "database"]
    assert (code, check["status"]) == (1, "fail") and f"cp {copy}" in check["advice"]
    for left in home.glob("computeshare.db*"):
        left.unlink()
    shutil.copy(copy, home / "computeshare.db")
    with control_plane(home) as plane:
        assert len(plane.get("/v1/jobs", limit=500)["items"]) == 200
        plane.until("the reducers' start", lambda: plane.pids("reducer"))


def test_up_ends_where_a_process_never_lives_long_enough_to_be_ready(home: Path) -> None:
    with closing(sqlite3.connect(home / "computeshare.db")) as connection:  # of a later release
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.commit()
    code, output, _ = computeshare(home, "up", "--port", str(free_port()), within_s=240)
    assert code == 3
    assert re.search(r"the api process ended \d time\(s\) before the control plane was ready", output)
    assert "Can't locate revision identified by '9999'" in output and "api.log" in output
