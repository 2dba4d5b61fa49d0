"""Uploads folders as bundles, piece by piece; what was sent before is not sent again."""

from pathlib import Path

from computeshare.bundles.source import Progress, described, pieces_of
from computeshare.client.api.bundles import Bundles


def upload(bundles: Bundles, source: Path, progress: Progress | None = None) -> str:
    """Upload a folder's files, or one file, as a bundle; returns its digest. Hidden files are left out.

    Args:
        progress: called with the bytes that the control plane has, and all bytes.
    Raises: BundleError: the files cannot make a bundle, or one changed meanwhile. NoServer, Problem.
    """
    manifest = described(source)
    missing, sizes = set(bundles.announce(manifest)["missing"]), manifest.pieces()
    done, total = sum(size for piece, size in sizes.items() if piece not in missing), sum(sizes.values())
    for piece, data in pieces_of(source, manifest):
        if piece in missing:
            bundles.put(manifest.digest, piece, data)
            missing.remove(piece)
            done += len(data)
        if progress:
            progress(done, total)
    return manifest.digest
