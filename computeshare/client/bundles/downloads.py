"""Downloads bundles, piece by piece, into a store; what it has is not downloaded again."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from computeshare.bundles.manifest import Manifest
from computeshare.bundles.store import BundleStore
from computeshare.client.api.bundles import Bundles
from computeshare.errors import BundleError


def download(bundles: Bundles, digest: str, store: BundleStore, only: Sequence[str] = ()) -> Path:
    """Download a bundle's files unless the store has them; returns the folder with them.

    Args:
        only: files whose paths start with one of these; all if it is empty.
    Raises: BundleError: it is not complete there, is damaged on its way, or cannot be stored. NoServer, Problem.
    """
    if not store.has(digest, only):
        manifest = _manifest(bundles, digest)
        with store.using(digest):
            store.adopt(manifest)
            missing, sizes = store.missing(manifest, only), manifest.pieces()
            store.make_room(sum(sizes[piece] for piece in missing))
            for piece in missing:
                store.put(digest, piece, bundles.piece(digest, piece))
    return store.open_files(digest, only)


def _manifest(bundles: Bundles, digest: str) -> Manifest:
    """Raises BundleError: the control plane's answer is not the bundle of this name."""
    answer: dict[str, Any] = {**bundles.show(digest)}
    try:
        manifest = Manifest.model_validate({"files": answer["files"]})
    except (KeyError, ValidationError) as error:
        raise BundleError(f"the control plane's answer is no bundle: {error}") from error
    if manifest.digest != digest:
        raise BundleError(f"the control plane has another bundle than {digest[:19]} under that name")
    return manifest
