"""Files that only their owner can read: secrets, and addresses that contain them."""

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from computeshare.runtime.durability import flush, flush_open


def write_private(path: Path, text: str) -> None:
    """Replace `path` by `text` in one step, mode 0600. The disk holds it on return."""
    os.replace(_written(path, text), path)
    flush(path.parent)


def kept_private(path: Path, make: Callable[[], str]) -> str:
    """The text of `path`, which `make` gives if there is no such file; of several processes, one makes it."""
    if not path.exists():
        temporary = _written(path, make())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
        temporary.unlink()
        flush(path.parent)
    return path.read_text()


def _written(path: Path, text: str) -> Path:
    """A new file beside `path` with this text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        flush_open(descriptor)
    return temporary
