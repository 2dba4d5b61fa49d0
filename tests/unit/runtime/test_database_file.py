"""The control plane's database file: what damage is found, what copies are kept, what is advised."""

import os
import shutil
import sqlite3
import time
from collections import namedtuple
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from computeshare.errors import DatabaseDamaged
from computeshare.runtime.database_file import DAY_S, KEPT, DatabaseFile

NOW_S = 1_800_000_000.0
PATIENCE_S = 20.0
PAGE = 4096


@pytest.fixture
def file(tmp_path: Path) -> DatabaseFile:
    """A database of some hundred pages, closed."""
    found = DatabaseFile(tmp_path / "computeshare.db", tmp_path / "backups")
    with closing(sqlite3.connect(found.path)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE job (id TEXT PRIMARY KEY, text TEXT)")
        connection.executemany("INSERT INTO job VALUES (?, ?)", ((f"{n:08}", "x" * 400) for n in range(2000)))
        connection.commit()
    return found


def rows(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return int(connection.execute("SELECT COUNT(*) FROM job").fetchone()[0])


def damage_every_third_page(path: Path) -> None:
    with open(path, "r+b") as opened:
        for page in range(2, path.stat().st_size // PAGE, 3):
            opened.seek(page * PAGE)
            opened.write(os.urandom(PAGE))


def test_a_whole_file_passes_also_while_another_writes_to_it(file: DatabaseFile) -> None:
    file.require_whole(PATIENCE_S)
    with closing(sqlite3.connect(file.path, isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("INSERT INTO job VALUES ('new', '')")
        assert file.damage(PATIENCE_S) is None
        writer.execute("COMMIT")


def test_no_file_and_an_empty_one_are_not_damaged(file: DatabaseFile) -> None:
    file.path.write_bytes(b"")
    assert file.damage(PATIENCE_S) is None
    file.path.unlink()
    assert file.damage(PATIENCE_S) is None and not file.path.exists()


def test_damaged_pages_are_found(file: DatabaseFile) -> None:
    damage_every_third_page(file.path)
    with pytest.raises(DatabaseDamaged, match=r"computeshare\.db is damaged \(.+\): stop computeshare, move"):
        file.require_whole(PATIENCE_S)


def test_a_file_that_is_no_database_is_found(file: DatabaseFile) -> None:
    file.path.write_bytes(os.urandom(10 * PAGE))
    assert file.damage(PATIENCE_S) == "file is not a database"


def test_looking_for_damage_ends_when_its_time_is_up(file: DatabaseFile) -> None:
    with closing(sqlite3.connect(file.path)) as connection:
        connection.executemany("INSERT INTO job VALUES (?, ?)", ((f"more{n:08}", "x") for n in range(500_000)))
        connection.commit()

    def seconds_of(look: Callable[[], None]) -> float:
        started = time.monotonic()
        look()
        return time.monotonic() - started

    def cut_short() -> None:
        with pytest.raises(TimeoutError, match=r"^the check for damage did not end within 0 s$"):
            file.damage(0.0)
        file.require_whole(0.0)  # a start goes on

    def whole() -> None:
        assert file.damage(PATIENCE_S) is None

    soonest_s = min(seconds_of(cut_short) for _ in range(5))  # a busy machine delays some of them
    assert soonest_s < 0.3 * seconds_of(whole)


def test_a_copy_is_whole_private_and_has_what_is_not_yet_in_the_main_file(file: DatabaseFile) -> None:
    with closing(sqlite3.connect(file.path, isolation_level=None)) as writer:
        writer.execute("INSERT INTO job VALUES ('new', '')")  # lies in the write-ahead log
        copy = file.copy(NOW_S)
    assert rows(copy) == 2001
    assert (copy.stat().st_mode & 0o777, copy.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert list(file.backups.iterdir()) == [copy]


def test_a_copy_is_due_once_a_day_and_the_newest_are_kept(file: DatabaseFile) -> None:
    made = []
    for day in range(KEPT + 2):
        now_s = NOW_S + day * DAY_S
        assert file.is_due(now_s)
        made.append(file.copy(now_s))
        assert not file.is_due(now_s + DAY_S - 1)
    assert file.copies() == made[-KEPT:] and file.newest_copy() == made[-1]


def test_a_copy_from_a_clock_that_was_ahead_does_not_hold_up_the_next(file: DatabaseFile) -> None:
    os.utime(file.copy(NOW_S), (NOW_S + 400 * DAY_S, NOW_S + 400 * DAY_S))
    assert file.is_due(NOW_S)


def test_copies_from_a_clock_that_was_ahead_count_as_older_than_the_next(file: DatabaseFile) -> None:
    ahead = [file.copy(NOW_S + days * DAY_S) for days in (400, 401)]
    assert file.is_due(NOW_S)
    made = file.copy(NOW_S)
    assert not file.is_due(NOW_S + 5) and file.newest_copy() == made
    assert file.copies() == [*ahead, made]
    later = [file.copy(NOW_S + day * DAY_S) for day in (1, 2)]
    assert file.copies() == [made, *later]


def test_a_damaged_file_leaves_the_copies_before_it(file: DatabaseFile) -> None:
    made = [file.copy(NOW_S + day * DAY_S) for day in range(KEPT)]
    damage_every_third_page(file.path)
    with pytest.raises(sqlite3.DatabaseError):
        file.copy(NOW_S + KEPT * DAY_S)
    assert sorted(file.backups.iterdir()) == made


def test_a_copy_that_would_fill_the_disk_is_not_made(file: DatabaseFile, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1, 1, file.path.stat().st_size))
    with pytest.raises(OSError, match="free bytes"):
        file.copy(NOW_S)
    assert list(file.backups.iterdir()) == []


def test_a_copy_ends_when_its_process_is_to_stop_and_what_a_killed_one_left_is_cleared(file: DatabaseFile) -> None:
    with pytest.raises(sqlite3.OperationalError, match="interrupted"):
        file.copy(NOW_S, stopping=lambda: True)
    assert list(file.backups.iterdir()) == []
    (file.backups / "computeshare-20200101-000000.partial").write_bytes(b"killed")
    assert list(file.backups.iterdir()) != [file.copy(NOW_S)] == list(file.backups.iterdir())


def test_the_advice_restores_the_newest_copy(file: DatabaseFile) -> None:
    file.copy(NOW_S - DAY_S)
    newest = file.copy(NOW_S)
    file.path.write_bytes(os.urandom(PAGE))
    assert f"cp {newest} {file.path}" in file.advice()
    shutil.copy(newest, file.path)
    assert file.damage(PATIENCE_S) is None and rows(file.path) == 2000
    shutil.rmtree(file.backups)
    assert "holds none yet" in file.advice()
