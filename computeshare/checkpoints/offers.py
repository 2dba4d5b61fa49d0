"""Checkpoints as bundles, read where they lie, for as long as a worker scores them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from computeshare.bundles.manifest import PIECE_BYTES, Manifest
from computeshare.bundles.source import file_entry
from computeshare.bundles.store import BundleStore
from computeshare.checkpoints.store import AVERAGE, MANIFEST, WEIGHTS, Artifacts
from computeshare.errors import ArtifactError, BundleMissing
from computeshare.types import Token


@dataclass(slots=True)
class _Offer:
    manifest: Manifest
    folder: Path
    users: int = 0


class Offers:
    """The pieces of a store's bundles, and of checkpoints that are `offered`; for any thread."""

    def __init__(self, bundles: BundleStore) -> None:
        self._bundles = bundles
        self._offers: dict[str, _Offer] = {}
        self._lock = threading.Lock()

    @contextmanager
    def offered(self, artifacts: Artifacts, token: Token) -> Iterator[str]:
        """Offer what is scored of a checkpoint within the block, under the digest returned: in a folder named by the
        token its manifest, and its moving average or else its weights. Raises ArtifactError.
        """
        names = sorted((MANIFEST, AVERAGE if artifacts.manifest(token).average else WEIGHTS))
        try:
            manifest = Manifest(files=tuple(file_entry(f"{token}/{one}", artifacts.path(token, one)) for one in names))
        except OSError as error:
            raise ArtifactError(f"the files of checkpoint {token} are missing or damaged: {error}") from error
        with self._lock:
            offer = self._offers.setdefault(manifest.digest, _Offer(manifest, artifacts.folder))
            offer.users += 1
        try:
            yield manifest.digest
        finally:
            with self._lock:
                offer.users -= 1
                if not offer.users:
                    del self._offers[manifest.digest]

    def manifest(self, digest: str) -> Manifest:
        """As `BundleStore.manifest`."""
        offer = self._offers.get(digest)
        return offer.manifest if offer else self._bundles.manifest(digest)

    def piece_bytes(self, digest: str, piece: str) -> int:
        """As `BundleStore.piece_bytes`."""
        if (offer := self._offers.get(digest)) is None:
            return self._bundles.piece_bytes(digest, piece)
        if size := offer.manifest.pieces().get(piece):
            return size
        raise _missing(piece)

    def piece(self, digest: str, piece: str) -> bytes:
        """As `BundleStore.piece`; whoever receives a piece compares it with its name."""
        if (offer := self._offers.get(digest)) is None:
            return self._bundles.piece(digest, piece)
        for file in offer.manifest.files:
            if piece in file.pieces:
                try:
                    with open(offer.folder / file.path, "rb") as content:
                        content.seek(file.pieces.index(piece) * PIECE_BYTES)
                        return content.read(PIECE_BYTES)
                except OSError as error:
                    raise BundleMissing(f"checkpoint {file.path} cannot be read: {error.strerror}") from error
        raise _missing(piece)


def _missing(piece: str) -> BundleMissing:
    return BundleMissing(f"no checkpoint offered has piece {piece[:12]}")
