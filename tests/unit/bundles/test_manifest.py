"""Manifests: what a bundle may hold, and that its digest is the same everywhere."""

import hashlib

import pytest
from pydantic import ValidationError

from computeshare.bundles.manifest import PIECE_BYTES, FileEntry, Manifest, is_safe_path
from computeshare.errors import BundleError

A, B = "a" * 64, "b" * 64


def entry(path: str, *pieces: str, size: int | None = None) -> FileEntry:
    return FileEntry(path=path, size=len(pieces) * PIECE_BYTES if size is None else size, pieces=pieces)


def test_a_digest_is_over_canonical_json() -> None:
    manifest = Manifest(files=(entry("train/é.bin", A, size=3),))
    content = f'{{"files":[{{"path":"train/é.bin","pieces":["{A}"],"size":3}}]}}'
    assert manifest.content == content.encode()
    assert manifest.digest == "sha256:" + hashlib.sha256(content.encode()).hexdigest()
    assert Manifest.parse(manifest.content) == manifest


def test_pieces_are_given_once_with_their_sizes_and_by_prefix() -> None:
    files = (entry("test/a", A), entry("train/a", A, B, size=PIECE_BYTES + 5), entry("train/empty"))
    manifest = Manifest(files=files)
    assert manifest.pieces() == {A: PIECE_BYTES, B: 5}
    assert list(manifest.pieces(only=("test/",))) == [A]
    assert [file.path for file in manifest.chosen(("train/",))] == ["train/a", "train/empty"]
    assert manifest.bytes == 2 * PIECE_BYTES + 5


@pytest.mark.parametrize(
    "path", ["", ".", "/etc/passwd", "../up", "a/../../b", "a//b", "a/", "a\\b", "c:d", "a\nb", "a" * 201]
)
def test_a_path_that_leads_out_or_does_not_fit_everywhere_is_refused(path: str) -> None:
    assert not is_safe_path(path)
    with pytest.raises(ValidationError, match="not a path inside"):
        entry(path)


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ((entry("b"), entry("a")), "sorted"),
        ((entry("a"), entry("a")), "sorted"),
        ((entry("a"), entry("a/b")), "both a file and a folder"),
        ((entry("A.png"), entry("a.png")), "same file on some systems"),
        ((), "at least 1 item"),
    ],
)
def test_files_that_do_not_make_one_folder_are_refused(files: tuple[FileEntry, ...], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        Manifest(files=files)


def test_a_file_has_the_pieces_that_its_size_needs() -> None:
    with pytest.raises(ValidationError, match="so 2 pieces, not 1"):
        entry("a", A, size=PIECE_BYTES + 1)
    with pytest.raises(ValidationError, match="pattern"):
        entry("a", "A" * 64)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"files":[]}', b'{"files":[{"path":"a","size":1,"pieces":[]}]}'])
def test_what_is_no_manifest_is_refused(content: bytes) -> None:
    with pytest.raises(BundleError, match="not a bundle's manifest"):
        Manifest.parse(content)
