"""A file system of its own that can be filled: a small tmpfs, for which one has to be root on Linux."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """`folder`, as a disk of this size until the end of the block."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting a small file system takes root on Linux")
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], check=True, timeout=10)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=10)


@contextmanager
def read_only(disk: Path) -> Iterator[None]:
    """A small disk, as one that cannot be written to until the end of the block."""
    _remount(disk, "ro")
    try:
        yield
    finally:
        _remount(disk, "rw")


def _remount(disk: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True, timeout=10)


def fill(folder: Path) -> Path:
    """Take all the space there is; returns the file to delete."""
    path = folder / "ballast"
    with open(path, "ab", buffering=0) as file:
        for piece in (1 << 20, 1 << 12):
            try:
                while file.write(bytes(piece)) == piece:
                    pass
            except OSError:
                continue
    return path
