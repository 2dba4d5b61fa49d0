"""A database file that is deleted, replaced or damaged under a running control plane."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from api.database import Database
from api.jobs.service import Jobs
from computeshare.errors import DatabaseDamaged, DatabaseLost
from computeshare.jobspec.spec import JobSpec
from computeshare.settings import Settings
from tests.support.wait import wait_until

SPEC: dict[str, Any] = {"dataset": "digits", "model": "mlp", "rounds": 30}


def delete_home(home: Path) -> None:
    shutil.rmtree(home)


def delete_file(home: Path) -> None:
    (home / "computeshare.db").unlink()


def replace_file(home: Path) -> None:
    shutil.copy(home / "computeshare.db", home / "other.db")
    (home / "other.db").replace(home / "computeshare.db")


@pytest.mark.parametrize("lose", [delete_home, delete_file, replace_file])
def test_what_would_be_lost_is_refused_once_the_file_is_another(
    client: TestClient, settings: Settings, lose: Callable[[Path], None]
) -> None:
    wait_until(lambda: client.get("/readyz").status_code == 200)
    job = client.post("/v1/jobs", json=SPEC).json()["id"]
    lose(settings.home)
    answers = [client.post("/v1/jobs", json=SPEC), client.post(f"/v1/jobs/{job}/pause"), client.get("/v1/jobs")]
    assert [answer.status_code for answer in answers] == [503] * 3
    assert "was deleted or replaced while in use" in answers[0].json()["detail"]
    ready = client.get("/readyz")
    assert ready.status_code == 503 and "stop computeshare" in ready.json()["dependencies"]["sqlite"]["detail"]
    assert (settings.home / "computeshare.db").exists() == (lose is replace_file)  # no empty one takes its place


def test_a_file_lost_in_mid_transaction_is_told(database: Database, jobs: Jobs, tmp_path: Path) -> None:
    with pytest.raises(DatabaseLost), database.writing() as connection:
        connection.exec_driver_sql("UPDATE job SET name = 'lost'")
        replace_file(tmp_path)


def test_a_damaged_file_is_told_with_what_to_do(database: Database, jobs: Jobs, tmp_path: Path) -> None:
    for number in range(200):
        jobs.create(JobSpec(dataset="digits", model="mlp", name=f"job {number}"))
    copy = database.file.copy(time.time())
    with database.engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    database.close()
    path = tmp_path / "computeshare.db"
    with open(path, "r+b") as file:
        for page in range(2, path.stat().st_size // 4096):
            file.seek(4096 * page)
            file.write(os.urandom(4096))
    with pytest.raises(DatabaseDamaged, match=f"cp {copy} {path}"), database.engine.connect() as connection:
        connection.exec_driver_sql("SELECT spec FROM job").all()
    with pytest.raises(DatabaseDamaged, match=f"cp {copy} {path}"):
        database.check()


def test_the_control_plane_copies_its_database(client: TestClient, settings: Settings) -> None:
    wait_until(lambda: client.get("/readyz").status_code == 200)
    assert len(settings.database_file.copies()) <= 1
    wait_until(lambda: len(settings.database_file.copies()) == 1)
    assert settings.database_file.damage(20.0) is None
