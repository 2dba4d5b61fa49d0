"""Copies of a job's checkpoints at another address: any file system that fsspec knows.

`ADDRESS/JOB/TOKEN/` holds what the checkpoint's folder holds, its manifest written last: a folder with a manifest is
complete. `ARTIFACTS/JOB/copies.json` says what has been copied and what went wrong.
"""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import fsspec
from pydantic import BaseModel, ValidationError

from computeshare.checkpoints.store import MANIFEST, replace_file

RECORD = "copies.json"


class Record(BaseModel):
    """The checkpoints of a job that have been copied."""

    address: str = ""
    """sha256 of the address, which may hold a password."""
    files: dict[str, dict[str, int]] = {}
    """The copied files of each checkpoint, by token, with their time of change (ns)."""
    error: str = ""
    """Why the newest attempt failed; empty: it did not."""

    @classmethod
    def read(cls, job: Path) -> "Record":
        """The record in a job's folder; an empty one where there is none."""
        try:
            return cls.model_validate_json((job / RECORD).read_bytes())
        except (OSError, ValidationError):
            return cls()

    def write(self, job: Path) -> None:
        replace_file(job / RECORD, self.model_dump_json().encode())


def copy(job: Path, tokens: Sequence[str], address: str) -> None:
    """Copy those of a job's checkpoints that are not at the address yet; then remove its other copies there, as far as
    this machine made them. Safe to repeat after a failure.

    Args:
        job: the folder of the job's checkpoints.
    Raises: Exception: whatever the file system of the address raises; the record has it, too.
    """
    record = Record.read(job)
    if record.address != (digest := hashlib.sha256(address.encode()).hexdigest()):
        record = Record(address=digest)
    before = record.model_copy(deep=True)
    try:
        files, root = fsspec.url_to_fs(address)
        for token in tokens:
            _bring(files, job / token, f"{root.rstrip('/')}/{job.name}/{token}", record)
        for token in record.files.keys() - set(tokens):
            where = f"{root.rstrip('/')}/{job.name}/{token}"
            if files.exists(where):
                files.rm(where, recursive=True)
            del record.files[token]
        record.error = ""
    except Exception as error:
        record.error = f"{type(error).__name__}: {error}".replace(address, "the address")[:300]
        raise
    finally:
        if record != before:
            record.write(job)


def _bring(files: fsspec.AbstractFileSystem, checkpoint: Path, where: str, record: Record) -> None:
    """Copy a checkpoint's new and changed files. One that is removed meanwhile is left out."""
    copied = record.files.get(checkpoint.name, {})
    try:
        changed = {path: path.stat().st_mtime_ns for path in _in_order(checkpoint.iterdir())}
        if changed := {path: at for path, at in changed.items() if copied.get(path.name) != at}:
            files.makedirs(where, exist_ok=True)
        for path, at in changed.items():
            files.put_file(str(path), f"{where}/{path.name}")
            copied[path.name] = at
    except FileNotFoundError:
        if checkpoint.is_dir():
            raise
        return
    record.files[checkpoint.name] = copied


def _in_order(paths: Iterable[Path]) -> list[Path]:
    """The files of a checkpoint, without those being replaced, the manifest last."""
    return sorted((path for path in paths if path.name[0] != "."), key=lambda path: (path.name == MANIFEST, path.name))
