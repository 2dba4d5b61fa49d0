"""The folder that a confined process writes to, as its owner handles it: what lies there is not to be trusted."""

import contextlib
import os
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from computeshare.errors import RecipeError


@contextlib.contextmanager
def temporary(prefix: str = "recipe-") -> Iterator[Path]:
    """A new folder, removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix=prefix)).resolve()
    try:
        yield folder
    finally:
        remove(folder)


def open_file(folder: Path, name: str, most_bytes: int) -> BinaryIO:
    """Open a file directly in the folder: follows no link, not at the folder either, and waits for no pipe.

    Raises: FileNotFoundError: no such file. RecipeError: it is larger, or not a file.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        parent = os.open(folder, flags | os.O_DIRECTORY)
        try:
            number = os.open(name, flags | os.O_NONBLOCK, dir_fd=parent)
        finally:
            os.close(parent)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RecipeError(f"the recipe's process left no file {name}, but something that cannot be read") from error
    found = os.fstat(number)
    if stat.S_ISREG(found.st_mode) and found.st_size <= most_bytes:
        return os.fdopen(number, "rb")
    os.close(number)
    raise RecipeError(f"the recipe's process left {name} with more than {most_bytes / 1e6:.0f} MB, or not as a file")


@dataclass(frozen=True, slots=True)
class Use:
    """Disk use of a folder: bytes and entries."""

    bytes: int
    entries: int


def use(folder: Path, most_entries: int) -> Use:
    """The disk use of the folder, counted up to a number of entries; follows no link.

    Raises: OSError: a folder in it cannot be listed, or lies too deep.
    """
    taken = entries = 0
    folders = [str(folder)]
    while folders and entries <= most_entries:
        with contextlib.suppress(FileNotFoundError), os.scandir(folders.pop()) as found:
            for entry in found:
                with contextlib.suppress(FileNotFoundError):
                    about = entry.stat(follow_symlinks=False)
                    taken += about.st_blocks * 512
                    entries += 1
                    if stat.S_ISDIR(about.st_mode):
                        folders.append(entry.path)
    return Use(taken, entries)


def remove(folder: Path) -> None:
    """Remove the folder whatever lies in it, following no link. The processes that write there must have ended.

    Python's own functions go too deep into nested folders, and in some releases change modes behind links.
    """
    command = ["/bin/rm", "-rf", "--", str(folder)]
    if subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode:  # folders without permissions
        subprocess.run(["/bin/chmod", "-R", "u+rwx", str(folder)], stderr=subprocess.DEVNULL, check=False)
        subprocess.run(command, stderr=subprocess.DEVNULL, check=False)
