"""Bundles on disk, a folder each (`bundles.folder`): those of the control plane, and a worker's copies, a cache."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from computeshare.bundles.folder import FILES, KEPT, BundleFolder, bytes_below
from computeshare.bundles.manifest import DIGEST, Manifest
from computeshare.bundles.source import Progress, described
from computeshare.errors import BundleError, BundleMissing, PieceDamaged
from computeshare.runtime.durability import Disk, flush

SCRATCH = ".scratch"
UNUSED_S = 86_400.0
"""Seconds after which the control plane removes a bundle that neither a job nor a data set names."""
CACHE_BYTES = 50_000_000_000
"""The most that a cache takes unless its owner says otherwise."""


class BundleStore:
    """The bundles in a folder; threads and processes may share it."""

    def __init__(self, root: Path, limit_bytes: int | None = None) -> None:
        """`limit_bytes`: the store is a cache that takes no more than this; None: it is the control plane's."""
        self._root, self._limit_bytes = root, limit_bytes
        self._contents = lru_cache(maxsize=16)(lambda digest: self._folder(digest).contents())
        self._checked: set[str] = set()
        """Bundles whose unfinished files were read back by this process."""

    def add(self, source: Path, progress: Progress | None = None) -> Manifest:
        """Store a folder's files, or one file, as a bundle, and return its manifest; hidden files are left out.

        `progress` is called with the bytes done and all bytes. Raises BundleError: the files cannot make a bundle, or
        cannot be stored.
        """
        with self._explained(), self._scratch() as scratch:
            manifest = described(source, progress, copy_to=scratch)
            self.adopt(manifest)
            folder = self._folder(manifest.digest)
            with folder.writing():
                for file in manifest.files:
                    if folder.lacks(file):
                        folder.flush(scratch / file.path)
                        folder.place(scratch / file.path, file)
                folder.forget_unfinished()
        return manifest

    def adopt(self, manifest: Manifest) -> bool:
        """Store a manifest, so that pieces can be put; returns whether it is new here. Raises BundleError."""
        folder = self._folder(manifest.digest)
        with self._explained(), folder.writing():
            if self._limit_bytes is None:
                (folder.path / KEPT).touch()
            folder.used()
            return folder.begin(manifest)

    def manifest(self, digest: str) -> Manifest:
        """A bundle's manifest. Raises BundleMissing: there is none, or it is damaged."""
        return self._contents(digest).manifest

    def has(self, digest: str, only: Sequence[str] = ()) -> bool:
        """Whether all files of a bundle, or those whose paths start with one of `only`, are here and complete."""
        try:
            return not any(map(self._folder(digest).lacks, self.manifest(digest).chosen(only)))
        except BundleError:
            return False

    def open_files(self, digest: str, only: Sequence[str] = ()) -> Path:
        """The folder with a bundle's complete files. Raises BundleError: some (that `only` names) are not here."""
        folder = self._folder(digest)
        if lacking := next(filter(folder.lacks, self.manifest(digest).chosen(only)), None):
            raise BundleError(f"{lacking.path} of bundle {digest[:19]} is not complete here: upload the bundle again")
        folder.used()
        return folder.path / FILES

    def missing(self, manifest: Manifest, only: Sequence[str] = ()) -> list[str]:
        """The pieces that are not here yet, each once, in the manifest's order."""
        self._check(manifest.digest)
        folder = self._folder(manifest.digest)
        chosen = {file.path for file in manifest.chosen(only)}
        lacking: dict[str, None] = {}
        for number, file in enumerate(manifest.files):
            if file.path in chosen and folder.lacks(file):
                have = folder.have(number, file)
                lacking |= dict.fromkeys(piece for piece, there in zip(file.pieces, have, strict=True) if not there)
        return list(lacking)

    def read_back(self, digest: str, always: bool = False) -> None:
        """Read a bundle's complete files back: what is damaged is `missing` from then on. Unless `always`, only if the
        machine was started, or a file changed, since the last time. Raises BundleError: they cannot be read.
        """
        folder = self._folder(digest)
        with contextlib.suppress(BundleMissing), self._explained():
            files = self.manifest(digest).files
            if always or not folder.is_read_back(files):
                with folder.writing():
                    folder.read_back(files)

    def put(self, digest: str, piece: str, data: bytes | memoryview) -> None:
        """Store a piece wherever the bundle has it. Raises PieceDamaged; BundleMissing: there is no such bundle or
        piece; BundleError: it cannot be stored.
        """
        contents, folder = self._contents(digest), self._folder(digest)
        if piece not in contents.places:
            raise BundleMissing(f"bundle {digest[:19]} has no piece {piece[:12]}: send only what the bundle lacks")
        if hashlib.sha256(data).hexdigest() != piece:
            raise PieceDamaged(f"piece {piece[:12]} arrived damaged: send it again")
        self._check(digest)
        with self._explained(), folder.writing():
            folder.used()  # an upload may take days
            for place in contents.places[piece]:
                file = contents.manifest.files[place.file]
                if folder.lacks(file):
                    folder.write(place, file, data)

    def piece(self, digest: str, piece: str) -> bytes:
        """A piece's bytes. Raises BundleMissing: there is no such piece here, or it is damaged."""
        contents, folder = self._contents(digest), self._folder(digest)
        for place in contents.places.get(piece, ()):
            for data in folder.read(place, contents.manifest.files[place.file]):
                if hashlib.sha256(data).hexdigest() == piece:
                    return data
        raise BundleMissing(f"bundle {digest[:19]} has no undamaged piece {piece[:12]} here: upload the bundle again")

    def piece_bytes(self, digest: str, piece: str) -> int:
        """A piece's size. Raises BundleMissing: the bundle has none of this name."""
        contents = self._contents(digest)
        for place in contents.places.get(piece, ()):
            return contents.manifest.files[place.file].piece_bytes(place.piece)
        raise BundleMissing(f"bundle {digest[:19]} has no piece {piece[:12]}")

    def remove(self, digest: str) -> bool:
        """Remove a bundle; returns False if a process is using it, and True if it is gone."""
        folder = self._folder(digest)
        if folder.path.exists():
            try:
                with self._scratch() as scratch, folder.using(fcntl.LOCK_EX | fcntl.LOCK_NB):
                    os.rename(folder.path, scratch / folder.path.name)
            except BlockingIOError:
                return False
        self._contents.cache_clear()
        self._checked.discard(digest)
        return True

    @contextmanager
    def using(self, digest: str) -> Iterator[None]:
        """Keep a bundle, which need not be here yet, from being removed within the block."""
        folder = self._folder(digest)
        with folder.using():
            folder.used()
            yield

    @contextmanager
    def fetching(self, digest: str) -> Iterator[None]:
        """Be the one process that fetches a bundle within the block. Raises BlockingIOError: another one does."""
        with self._folder(digest).fetching():
            yield

    def digests(self) -> list[str]:
        """All bundles, complete or not; the one that was not used for longest first."""
        folders = [BundleFolder(path) for path in self._root.glob("[0-9a-f]" * 64)]
        return [DIGEST + folder.path.name for folder in sorted(folders, key=lambda folder: folder.used_at())]

    def remove_unnamed(self, named: Collection[str], unused_s: float = UNUSED_S) -> list[str]:
        """Remove the control plane's bundles that are not `named` and were not used for `unused_s`; returns them."""
        self._clear_scratch()
        before = time.time() - unused_s
        old = [digest for digest in self.digests() if digest not in named and self._folder(digest).used_at() < before]
        return [digest for digest in old if self._is_kept(digest) and self.remove(digest)]

    def make_room(self, needed_bytes: int) -> None:
        """Remove the bundles of a cache that were not used for longest, until `needed_bytes` more are within its limit.

        Raises BundleError: what is in use leaves too little of it.
        """
        self._clear_scratch()
        if self._limit_bytes is None:
            return
        sizes = {one: bytes_below(self._folder(one).path) for one in self.digests() if not self._is_kept(one)}
        for digest in list(sizes):
            if sum(sizes.values()) + needed_bytes <= self._limit_bytes:
                return
            if self.remove(digest):
                del sizes[digest]
        if (used := sum(sizes.values())) + needed_bytes > self._limit_bytes:
            raise BundleError(
                f"{needed_bytes / 1e9:,.1f} GB of data do not fit: this worker may keep "
                f"{self._limit_bytes / 1e9:,.1f} GB of fetched data, and {used / 1e9:,.1f} GB are in use. "
                "Raise COMPUTESHARE_CACHE there"
            )

    def _folder(self, digest: str) -> BundleFolder:
        return BundleFolder.of(self._root, digest, flush if self._limit_bytes is None else _leave)

    def _is_kept(self, digest: str) -> bool:
        return (self._folder(digest).path / KEPT).exists()

    def _check(self, digest: str) -> None:
        """Before this process first writes to a bundle, forget what is damaged in its unfinished files."""
        folder = self._folder(digest)
        if digest not in self._checked:
            with contextlib.suppress(BundleMissing), self._explained():
                files = self.manifest(digest).files
                with folder.writing():
                    folder.forget_damaged(files)
                self._checked.add(digest)

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        """A folder on the same disk that is gone after the block."""
        folder = self._root / SCRATCH / uuid.uuid4().hex
        folder.mkdir(parents=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _clear_scratch(self) -> None:
        """Remove what killed processes left behind."""
        for path in (self._root / SCRATCH).glob("*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > UNUSED_S:
                    shutil.rmtree(path)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn an error of the disk into a BundleError that says what would help."""
        try:
            yield
        except OSError as error:
            raise BundleError(Disk.of(self._root).explained(error)) from error


def cache_limit(root: Path, allowed_bytes: int) -> int:
    """The limit of a cache in a folder: `allowed_bytes`, or if that is 0, `CACHE_BYTES` or half of what would be free
    without the cache, whichever is less. Raises OSError.
    """
    return allowed_bytes or min(CACHE_BYTES, (Disk.of(root).free_bytes + bytes_below(root)) // 2)


def _leave(path: Path) -> None:
    """Leave it to the system when a cache's files reach the disk: what is lost is fetched again."""
