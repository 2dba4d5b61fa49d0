"""What a worker tells its machine's owner."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from computeshare.worker import status_file
from computeshare.worker.seat.progress_pipe import SeatLink, SeatProgress
from computeshare.worker.status_file import Running, StatusFile, WorkerStatus, began, described, read_totals


def status(worker: str = "aaaaaaaaaaaa", **changes: object) -> WorkerStatus:
    about = {"id": worker, "name": "mac", "pid": os.getpid(), "began": began(), "control_plane": "https://home.example"}
    return WorkerStatus.model_validate(about | {"queues": ["q"], "device": "cpu"} | changes)


def test_the_file_is_its_owners_alone_and_goes_with_the_worker(tmp_path: Path) -> None:
    file = StatusFile(tmp_path, status(), lambda: (3, 5))
    file.write(state="idle")
    (path,) = (tmp_path / "workers").glob("*.json")
    assert path.stat().st_mode & 0o777 == 0o600
    (one,) = Running.all(tmp_path)
    assert (one.status.state, one.status.moved.bytes_up, one.status.moved.bytes_down) == ("idle", 3, 5)
    file.remove()
    assert Running.all(tmp_path) == [] and not path.exists()


def test_a_killed_worker_is_listed_as_ended_once(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    StatusFile(tmp_path, status("bbbbbbbbbbbb", pid=gone.pid)).write(state="busy", job=described("j", None))
    StatusFile(tmp_path, status("cccccccccccc", began=began() - 60)).write(state="idle")  # its number was used again
    StatusFile(tmp_path, status()).write(state="idle")
    (tmp_path / "workers" / "dddddddddddd.json").write_text("{not json")
    assert {one.status.id: one.status.state for one in Running.all(tmp_path)} == {
        "aaaaaaaaaaaa": "idle",
        "bbbbbbbbbbbb": "ended",
        "cccccccccccc": "ended",
    }
    assert [one.status.id for one in Running.all(tmp_path)] == ["aaaaaaaaaaaa"]


def test_totals_outlive_the_workers_and_add_up_over_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_file, "SAVE_S", -1.0)
    moved = [(10, 100), (20, 200)]
    first, second = (StatusFile(tmp_path, status(worker * 12), lambda: moved[0]) for worker in "ab")
    first.write(state="busy")
    moved[0] = moved[1]
    for each in (first, first, second):
        each.write(state="busy")
    first.remove()
    second.remove()
    totals = read_totals(tmp_path)
    assert (totals.bytes_up, totals.bytes_down) == (40, 400) and totals.since == began()


def test_a_folder_that_cannot_be_written_does_not_disturb_the_worker(tmp_path: Path) -> None:
    (tmp_path / "workers").write_text("in the way")
    file = StatusFile(tmp_path, status())
    file.write(state="idle")
    file.remove()
    assert not file.is_asked_to_stop and Running.all(tmp_path) == []


def test_the_owners_wish_is_remembered_until_the_process_has_ended(tmp_path: Path) -> None:
    file = StatusFile(tmp_path, status())
    file.write(state="idle")
    assert not file.is_asked_to_stop
    (tmp_path / "workers" / "aaaaaaaaaaaa.stop").touch()
    assert file.is_asked_to_stop
    file.remove()
    assert file.is_asked_to_stop and list((tmp_path / "workers").glob("*.stop")) == []


def test_a_job_is_described_by_what_the_broker_holds() -> None:
    found = described("j1", '{"name": "birds", "recipe": "sha256:4f"}', "Ada")
    assert (found.id, found.name, found.creator, found.recipe) == ("j1", "birds", "Ada", "sha256:4f")
    for damaged in (None, "", "[1]", "{", '{"name": null}'):
        assert described("j1", damaged) == status_file.CurrentJob(id="j1")


def test_a_worker_counts_the_bytes_of_all_its_seats() -> None:
    link = SeatLink()
    assert link.moved == (0, 0)
    for up, down in ((5, 7), (11, 13)):
        link.hear(SeatProgress("working", bytes_up=up, bytes_down=down))
        link.over()
    link.hear(SeatProgress("working", bytes_up=1, bytes_down=2))
    assert link.moved == (17, 22)
