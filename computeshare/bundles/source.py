"""Reads a folder as a bundle: its files, their pieces, and the pieces' digests."""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path, PurePosixPath

from pydantic import ValidationError

from computeshare.bundles.manifest import MOST_FILES, PIECE_BYTES, FileEntry, Manifest, is_safe_path
from computeshare.errors import BundleError
from computeshare.jobspec.part import plain_errors

Progress = Callable[[int, int], object]
"""Is called with the bytes done and all bytes."""


def described(source: Path, progress: Progress | None = None, copy_to: Path | None = None) -> Manifest:
    """The manifest of a folder's files, or of one file; hidden files are left out.

    Args:
        copy_to: a folder that gets a copy of what was read, so that the copy matches the manifest even if a file
            changes meanwhile.
    Raises: BundleError: the files cannot make a bundle. OSError: a copy cannot be written.
    """
    paths = listed(source)
    try:
        total, done, entries = sum(path.stat().st_size for path in paths.values()), 0, []
        for name, path in paths.items():
            pieces, size = [], 0
            for piece in _read(path, copy_to and copy_to / name):
                pieces.append(hashlib.sha256(piece).hexdigest())
                size += len(piece)
                done += len(piece)
                if progress:
                    progress(done, max(done, total))
            entries.append(FileEntry(path=name, size=size, pieces=tuple(pieces)))
        return Manifest(files=tuple(entries))
    except ValidationError as error:
        raise BundleError(plain_errors(error.errors(include_url=False))[0]["msg"]) from error


def file_entry(name: str, path: Path) -> FileEntry:
    """A file's entry in a manifest, under another name. Raises OSError."""
    pieces, size = [], 0
    with open(path, "rb") as file:
        while piece := file.read(PIECE_BYTES):
            pieces.append(hashlib.sha256(piece).hexdigest())
            size += len(piece)
    return FileEntry(path=name, size=size, pieces=tuple(pieces))


def pieces_of(source: Path, manifest: Manifest) -> Iterator[tuple[str, bytes]]:
    """Each piece's name and bytes. Raises BundleError: a file changed since the manifest was made."""
    paths = listed(source)
    for file in manifest.files:
        data = _read(paths[file.path], None) if file.path in paths else iter(())
        for piece in file.pieces:
            content = next(data, b"")
            if hashlib.sha256(content).hexdigest() != piece:
                raise BundleError(f"{file.path} changed while it was read: leave the files alone, and try again")
            yield piece, content


def listed(source: Path) -> dict[str, Path]:
    """The files that make a bundle, by their path in it, sorted. Raises BundleError: there are none, or too many."""
    if source.is_file():
        return {_checked(source.name): source}
    found: dict[str, Path] = {}
    for folder, folders, files in os.walk(source, followlinks=False):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                found[_checked(PurePosixPath(path.relative_to(source)).as_posix())] = path
        if len(found) > MOST_FILES:
            raise BundleError(f"{source} has more than {MOST_FILES:,} files: pack them into larger ones")
    if not found:
        raise BundleError(f"there are no files in {source}: give a file, or a folder with files")
    return dict(sorted(found.items()))


def _checked(name: str) -> str:
    if not is_safe_path(name):
        raise BundleError(f"{name[:300]!r} is too long, or has characters that not every system takes: rename it")
    return name


def _read(path: Path, copy: Path | None) -> Iterator[bytes]:
    """A file's pieces, each written to `copy` before it is returned."""
    with ExitStack() as files:
        try:
            file = files.enter_context(open(path, "rb"))
        except OSError as error:
            raise BundleError(f"{path} cannot be read: {error.strerror}") from error
        target = None
        if copy:
            copy.parent.mkdir(parents=True, exist_ok=True)
            target = files.enter_context(open(copy, "xb"))
        while piece := file.read(PIECE_BYTES):
            if target:
                target.write(piece)
            yield piece
