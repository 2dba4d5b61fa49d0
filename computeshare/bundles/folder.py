"""The folder of one bundle: complete and unfinished files, and locks.

`HEX/` holds `manifest.json`, the complete files below `files/` in their final form, and below `unfinished/` for each
incomplete file, named by its place in the manifest, its bytes so far and `PLACE.have`, a byte for each piece that is
there. A file moves from `unfinished` to `files` when its last piece is there, so that what a killed process leaves
behind is resumed. `kept` marks what the control plane stores: a worker on the same machine uses it, and never removes
it to make room. `read-back` has the time when the complete files were last read back. Processes that read the bundle
hold a shared lock on `in-use`, whose time is that of the last use.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import psutil

from computeshare.bundles.manifest import DIGEST, PIECE_BYTES, FileEntry, Manifest
from computeshare.errors import BundleMissing
from computeshare.runtime.durability import flush

MANIFEST, FILES, UNFINISHED, KEPT = "manifest.json", "files", "unfinished", "kept"
IN_USE, WRITING, FETCHING, READ_BACK = "in-use", "writing", "fetching", "read-back"
Flush = Callable[[Path], None]


class PiecePlace(NamedTuple):
    """A piece's place: its file's number in the manifest, and its own number in the file."""

    file: int
    piece: int


@dataclass(frozen=True)
class Contents:
    """A bundle's manifest, and where each piece belongs."""

    manifest: Manifest

    @cached_property
    def places(self) -> Mapping[str, list[PiecePlace]]:
        places: defaultdict[str, list[PiecePlace]] = defaultdict(list)
        for number, file in enumerate(self.manifest.files):
            for piece, name in enumerate(file.pieces):
                places[name].append(PiecePlace(number, piece))
        return dict(places)


@dataclass(frozen=True, slots=True)
class BundleFolder:
    """Reads and writes a bundle's folder, which need not exist. `flush` makes what was written durable."""

    path: Path
    flush: Flush = flush

    @classmethod
    def of(cls, root: Path, digest: str, flush: Flush = flush) -> "BundleFolder":
        """Raises BundleMissing: `digest` is no digest, and unsafe as a folder's name."""
        name = digest.removeprefix(DIGEST)
        if not digest.startswith(DIGEST) or len(name) != 64 or not set(name) <= set("0123456789abcdef"):
            raise BundleMissing(f"{digest[:100]!r} is no bundle's digest: give sha256: and 64 hex digits")
        return cls(root / name, flush)

    def contents(self) -> Contents:
        """Raises BundleMissing: there is no such bundle, or its manifest is damaged."""
        name = f"{DIGEST}{self.path.name[:12]}"
        try:
            content = (self.path / MANIFEST).read_bytes()
        except OSError as error:
            raise BundleMissing(f"there is no bundle {name} here: upload it again") from error
        if hashlib.sha256(content).hexdigest() != self.path.name:
            raise BundleMissing(f"the manifest of bundle {name} is damaged: upload the bundle again")
        return Contents(Manifest.parse(content))

    def begin(self, manifest: Manifest) -> bool:
        """Write the manifest, and the files that have no pieces; returns False if it is here. Raises OSError."""
        (self.path / FILES).mkdir(exist_ok=True)
        for file in manifest.files:
            if not file.size and self.lacks(file):
                self.file(file).parent.mkdir(parents=True, exist_ok=True)
                self.file(file).write_bytes(b"")
        with contextlib.suppress(BundleMissing):
            self.contents()
            return False
        new = self.path / f"{MANIFEST}.new"
        new.write_bytes(manifest.content)
        flush(new)
        os.replace(new, self.path / MANIFEST)
        flush(self.path)
        return True

    def file(self, file: FileEntry) -> Path:
        """The path of a complete file."""
        return self.path / FILES / file.path

    def lacks(self, file: FileEntry) -> bool:
        """Whether a file is not complete."""
        try:
            return self.file(file).stat().st_size != file.size
        except OSError:
            return True

    def have(self, number: int, file: FileEntry) -> bytearray:
        """A byte for each piece of an unfinished file: not 0 if the piece is there."""
        try:
            content = self._have(number).read_bytes()
        except FileNotFoundError:
            content = b""
        return bytearray(content.ljust(len(file.pieces), b"\0"))

    def write(self, place: PiecePlace, file: FileEntry, data: bytes | memoryview) -> None:
        """Write a piece to its place; the last one completes the file. Raises OSError."""
        path = self._unfinished(place.file)
        path.parent.mkdir(exist_ok=True)
        _write_at(path, place.piece * PIECE_BYTES, data)
        _write_at(self._have(place.file), place.piece, b"\1")
        if all(self.have(place.file, file)):
            self.flush(path)
            self.place(path, file)
            self._have(place.file).unlink()

    def place(self, source: Path, file: FileEntry) -> None:
        """Move a complete file to where it belongs. Raises OSError."""
        target = self.file(file)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(source, target)
        self.flush(target.parent)

    def read(self, place: PiecePlace, file: FileEntry) -> Iterator[bytes]:
        """Yield the bytes at a place in the complete file and in the unfinished file, for each file that exists."""
        for path in (self.file(file), self._unfinished(place.file)):
            with contextlib.suppress(FileNotFoundError), open(path, "rb") as opened:
                opened.seek(place.piece * PIECE_BYTES)
                yield opened.read(file.piece_bytes(place.piece))

    def forget_damaged(self, files: Iterable[FileEntry]) -> None:
        """Read unfinished files back, and forget the pieces that are not what they should be: a loss of power may have
        undone writes. Raises OSError.
        """
        for number, file in enumerate(files):
            have = self.have(number, file)
            if not any(have):
                continue
            with open(self._unfinished(number), "rb") as opened:
                for piece in (piece for piece, there in enumerate(have) if there):
                    opened.seek(piece * PIECE_BYTES)
                    read = hashlib.sha256(opened.read(file.piece_bytes(piece))).hexdigest()
                    have[piece] = read == file.pieces[piece]
            self._have(number).write_bytes(have)

    def is_read_back(self, files: Iterable[FileEntry]) -> bool:
        """Whether `read_back` was called after the machine started, and after the files last changed."""
        try:
            at = (self.path / READ_BACK).stat().st_mtime
            changed = (self.file(file).stat().st_mtime for file in files if not self.lacks(file))
            return at > max(psutil.boot_time(), *changed, 0.0)
        except OSError:
            return False

    def read_back(self, files: Iterable[FileEntry]) -> None:
        """Read complete files back, and make the damaged ones unfinished, with their good pieces. Raises OSError."""
        for number, file in enumerate(files):
            if self.lacks(file):
                continue
            with open(self.file(file), "rb") as opened:
                have = bytearray(hashlib.sha256(opened.read(PIECE_BYTES)).hexdigest() == name for name in file.pieces)
            if not all(have):
                self._unfinished(number).parent.mkdir(exist_ok=True)
                os.replace(self.file(file), self._unfinished(number))
                self._have(number).write_bytes(have)
        (self.path / READ_BACK).touch()

    def forget_unfinished(self) -> None:
        shutil.rmtree(self.path / UNFINISHED, ignore_errors=True)

    @contextmanager
    def using(self, kind: int = fcntl.LOCK_SH) -> Iterator[None]:
        """Keep the folder, which is made, from being removed within the block; with `LOCK_EX`, have it alone."""
        self.path.mkdir(parents=True, exist_ok=True)
        with _locked(self.path / IN_USE, kind):
            yield

    @contextmanager
    def writing(self) -> Iterator[None]:
        """As `using`, and no other process or thread writes within the block."""
        with self.using(), _locked(self.path / WRITING, fcntl.LOCK_EX):
            yield

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """As `using`, and no other process fetches within the block. Raises BlockingIOError: one does."""
        with self.using(), _locked(self.path / FETCHING, fcntl.LOCK_EX | fcntl.LOCK_NB):
            yield

    def used(self) -> None:
        """Note that the bundle is used now."""
        with contextlib.suppress(OSError):  # somebody else's, or on a disk that is mounted for reading
            os.utime(self.path / IN_USE)

    def used_at(self) -> float:
        """When the bundle was last used, in seconds since 1970."""
        try:
            return (self.path / IN_USE).stat().st_mtime
        except OSError:
            return 0.0

    def _unfinished(self, number: int) -> Path:
        return self.path / UNFINISHED / str(number)

    def _have(self, number: int) -> Path:
        return self.path / UNFINISHED / f"{number}.have"


def bytes_below(folder: Path) -> int:
    """Disk space taken by the files below a folder, in bytes."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # removed meanwhile
            total += path.lstat().st_blocks * 512
    return total


def _write_at(path: Path, offset: int, data: bytes | memoryview) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644), "wb") as file:
        file.seek(offset)
        file.write(data)


@contextmanager
def _locked(path: Path, kind: int) -> Iterator[None]:
    """Hold a lock on a file within the block. Raises BlockingIOError: `kind` does not wait, and others hold it."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, kind)
            if _is_at(descriptor, path):
                yield
                return  # else the folder was removed before the lock was free
        finally:
            os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
