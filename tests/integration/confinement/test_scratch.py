"""What a confined process leaves in its folder is handled without harm."""

import os
from pathlib import Path

import pytest

from computeshare.confinement import scratch
from computeshare.errors import RecipeError


def test_a_file_is_read_and_no_link_pipe_folder_or_giant(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    with scratch.temporary() as folder:
        (folder / "good").write_text("good")
        (folder / "link").symlink_to(tmp_path / "secret")
        (folder / "folder").mkdir()
        (folder / "outside").symlink_to(tmp_path)
        os.mkfifo(folder / "pipe")
        with (folder / "giant").open("wb") as file:
            file.truncate(1 << 40)
        with scratch.open_file(folder, "good", 100) as file:
            assert file.read() == b"good"
        for name in ("link", "folder", "pipe", "giant"):
            with pytest.raises(RecipeError, match=name):
                scratch.open_file(folder, name, 100)
        with pytest.raises(RecipeError, match="secret"):
            scratch.open_file(folder / "outside", "secret", 100)
        with pytest.raises(FileNotFoundError):
            scratch.open_file(folder, "none", 100)


def test_the_use_of_disk_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    for number in range(10):
        (tmp_path / "outside" / str(number)).write_bytes(bytes(10_000))
    with scratch.temporary() as folder:
        (folder / "own").write_bytes(bytes(10_000))
        (folder / "link").symlink_to(tmp_path / "outside")
        (folder / "loop").symlink_to(folder)
        found = scratch.use(folder, 1000)
        assert (found.entries, 10_000 <= found.bytes < 50_000) == (3, True)


def test_the_folder_is_removed_whatever_lies_in_it_and_nothing_else(tmp_path: Path) -> None:
    """A folder without permissions, one behind a link, and one deeper than Python's functions go."""
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o500)
    with scratch.temporary() as folder:
        (folder / "link").symlink_to(outside)
        (folder / "closed").mkdir()
        (folder / "closed/file").write_text("x")
        (folder / "closed/link").symlink_to(outside)
        (folder / "closed").chmod(0)
        here = os.getcwd()  # noqa: PTH109
        os.chdir(folder)
        for _ in range(3000):
            os.mkdir("deep")  # noqa: PTH102
            os.chdir("deep")
        os.chdir(here)
    assert not folder.exists() and outside.stat().st_mode & 0o777 == 0o500
