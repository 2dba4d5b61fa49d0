"""What is called durable is held by the disk itself, on macOS too."""

import errno
import fcntl
import os
import sys
from pathlib import Path

import pytest
from sqlalchemy import text

from api.database import Database
from computeshare.runtime import durability

F_FULLFSYNC = 51
"""Its number on macOS; Linux knows none of that number."""


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How files were flushed, in turn."""
    calls: list[str] = []
    fsync = os.fsync

    def counted(descriptor: int) -> None:
        calls.append("fsync")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", counted)
    return calls


def test_a_drive_is_told_to_empty_its_cache_where_the_system_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flushed: list[str]
) -> None:
    monkeypatch.setattr(durability, "FULL_FSYNC", F_FULLFSYNC)
    monkeypatch.setattr(fcntl, "fcntl", lambda _descriptor, command: flushed.append(f"fcntl {command}"))
    durability.flush(tmp_path)
    assert flushed == [f"fcntl {F_FULLFSYNC}"]


def test_a_file_system_that_cannot_do_that_is_flushed_as_well_as_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flushed: list[str]
) -> None:
    (tmp_path / "file").write_bytes(b"content")
    monkeypatch.setattr(durability, "FULL_FSYNC", F_FULLFSYNC)
    durability.flush(tmp_path / "file")  # the system's own answer: EINVAL on Linux
    assert flushed == ([] if sys.platform == "darwin" else ["fsync"])


def test_a_drive_that_fails_is_not_taken_for_one_that_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flushed: list[str]
) -> None:
    def broken(_descriptor: int, _command: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(durability, "FULL_FSYNC", F_FULLFSYNC)
    monkeypatch.setattr(fcntl, "fcntl", broken)
    with pytest.raises(OSError, match="Input/output"):
        durability.flush(tmp_path)
    assert flushed == []


def test_every_connection_to_the_database_flushes_fully(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'computeshare.db'}")
    with database.engine.connect() as connection:
        found = [
            connection.execute(text(f"PRAGMA {name}")).scalar_one() for name in ("fullfsync", "checkpoint_fullfsync")
        ]
    database.close()
    assert found == [1, 1]
