"""Bundles on disk: added, put piece by piece, resumed, removed."""

import hashlib
import os
import random
import time
from pathlib import Path

import pytest

from computeshare.bundles.folder import UNFINISHED
from computeshare.bundles.manifest import PIECE_BYTES, Manifest
from computeshare.bundles.source import described
from computeshare.bundles.store import CACHE_BYTES, BundleStore, cache_limit
from computeshare.errors import BundleError, BundleMissing, PieceDamaged

LARGE = 2 * PIECE_BYTES + 17


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with a file of three pieces, small files, an empty one, and a hidden one."""
    folder = tmp_path / "source"
    (folder / "train").mkdir(parents=True)
    (folder / "test").mkdir()
    (folder / "train" / "large.bin").write_bytes(random.Random(0).randbytes(LARGE))
    (folder / "test" / "a.txt").write_text("hello")
    (folder / "test" / "same.txt").write_text("hello")
    (folder / "test" / "empty").touch()
    (folder / ".DS_Store").write_text("no")
    return folder


@pytest.fixture
def store(tmp_path: Path) -> BundleStore:
    return BundleStore(tmp_path / "bundles")


def pieces_of(source: Path) -> dict[str, bytes]:
    contents = [path.read_bytes() for path in source.rglob("*") if path.is_file()]
    cut = (content[at : at + PIECE_BYTES] for content in contents for at in range(0, len(content), PIECE_BYTES))
    return {hashlib.sha256(piece).hexdigest(): piece for piece in cut}


def test_an_added_folder_is_there_as_it_was(source: Path, store: BundleStore) -> None:
    told: list[tuple[int, int]] = []
    manifest = store.add(source, lambda done, total: told.append((done, total)))
    files = store.open_files(manifest.digest)
    found = {path.relative_to(files).as_posix(): path.read_bytes() for path in files.rglob("*") if path.is_file()}
    assert found == {name: (source / name).read_bytes() for name in found}
    assert list(found) and set(found) == {"test/a.txt", "test/empty", "test/same.txt", "train/large.bin"}
    assert store.missing(manifest) == [] and manifest == described(source)
    assert told[-1] == (manifest.bytes, manifest.bytes) and told == sorted(told)


def test_a_single_file_is_a_bundle(source: Path, store: BundleStore) -> None:
    manifest = store.add(source / "test" / "a.txt")
    assert (store.open_files(manifest.digest) / "a.txt").read_text() == "hello"


def test_a_bundle_is_complete_once_every_piece_was_put(source: Path, store: BundleStore) -> None:
    manifest, pieces = described(source), pieces_of(source)
    store.adopt(manifest)
    assert store.missing(manifest, only=("test/",)) == [hashlib.sha256(b"hello").hexdigest()]
    missing = store.missing(manifest)
    assert missing == list(manifest.pieces())
    for piece in missing:
        with pytest.raises(BundleError, match="not complete here"):
            store.open_files(manifest.digest)
        store.put(manifest.digest, piece, pieces[piece])
        assert store.piece(manifest.digest, piece) == pieces[piece]
    assert store.missing(manifest) == [] and store.has(manifest.digest)
    files = store.open_files(manifest.digest)
    assert (files / "train" / "large.bin").read_bytes() == (source / "train" / "large.bin").read_bytes()
    assert (files / "test" / "same.txt").read_text() == "hello" and (files / "test" / "empty").exists()
    assert not list((files.parent / UNFINISHED).iterdir())


def test_a_part_of_a_bundle_can_be_used_first(source: Path, store: BundleStore) -> None:
    manifest = described(source)
    store.adopt(manifest)
    store.put(manifest.digest, hashlib.sha256(b"hello").hexdigest(), b"hello")
    assert store.has(manifest.digest, ("test/",)) and not store.has(manifest.digest)
    assert (store.open_files(manifest.digest, ("test/",)) / "test" / "a.txt").read_text() == "hello"


def test_pieces_that_are_not_what_they_are_called_are_refused(source: Path, store: BundleStore) -> None:
    manifest = described(source)
    store.adopt(manifest)
    first = store.missing(manifest)[0]
    with pytest.raises(PieceDamaged, match="arrived damaged"):
        store.put(manifest.digest, first, b"something else")
    with pytest.raises(BundleMissing, match="has no piece"):
        store.put(manifest.digest, hashlib.sha256(b"x").hexdigest(), b"x")
    assert first in store.missing(manifest)


def test_another_process_resumes_and_forgets_what_a_loss_of_power_undid(source: Path, tmp_path: Path) -> None:
    manifest, pieces = described(source), pieces_of(source)
    store = BundleStore(tmp_path / "bundles")
    store.adopt(manifest)
    large = manifest.files[-1].pieces
    for piece in large[:2]:
        store.put(manifest.digest, piece, pieces[piece])
    unfinished = tmp_path / "bundles" / manifest.digest[7:] / UNFINISHED / "3"
    assert unfinished.stat().st_size == 2 * PIECE_BYTES
    with open(unfinished, "r+b") as file:
        file.seek(PIECE_BYTES + 5)
        file.write(b"\0\0\0\0")
    again = BundleStore(tmp_path / "bundles")
    assert [piece for piece in again.missing(manifest) if piece in large] == list(large[1:])
    for piece in again.missing(manifest):
        again.put(manifest.digest, piece, pieces[piece])
    assert (again.open_files(manifest.digest) / "train" / "large.bin").read_bytes() == (
        source / "train" / "large.bin"
    ).read_bytes()


def test_a_damaged_file_is_not_sent(source: Path, store: BundleStore) -> None:
    manifest = store.add(source)
    (store.open_files(manifest.digest) / "test" / "a.txt").write_text("jello")
    (store.open_files(manifest.digest) / "test" / "same.txt").write_text("jello")
    with pytest.raises(BundleMissing, match="no undamaged piece"):
        store.piece(manifest.digest, hashlib.sha256(b"hello").hexdigest())


@pytest.mark.parametrize("digest", ["sha256:" + "0" * 64, "sha256:../../etc", "", "0" * 64, "sha256:" + "A" * 64])
def test_an_unknown_bundle_leaves_nothing_on_the_disk(digest: str, tmp_path: Path) -> None:
    store = BundleStore(tmp_path / "bundles")
    for call in (store.manifest, store.open_files, lambda name: store.piece(name, "0" * 64)):
        with pytest.raises(BundleMissing):
            call(digest)
    assert not (tmp_path / "bundles").exists()


def test_a_damaged_manifest_is_told_and_mended_by_the_next_upload(
    source: Path, store: BundleStore, tmp_path: Path
) -> None:
    manifest = store.add(source)
    path = tmp_path / "bundles" / manifest.digest[7:] / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b"a.txt", b"b.txt"))
    again = BundleStore(tmp_path / "bundles")
    with pytest.raises(BundleMissing, match="damaged: upload the bundle again"):
        again.open_files(manifest.digest)
    assert again.adopt(manifest) and again.has(manifest.digest)


def damage(path: Path, at: int) -> None:
    """Change a byte; the size stays."""
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def test_a_damaged_bundle_lacks_its_damaged_pieces_and_is_mended_by_them(source: Path, store: BundleStore) -> None:
    manifest, pieces = store.add(source), pieces_of(source)
    files = store.open_files(manifest.digest)
    damage(files / "train" / "large.bin", PIECE_BYTES + 5)
    (files / "test" / "empty").unlink()
    store.read_back(manifest.digest)
    assert not store.has(manifest.digest) and store.missing(manifest) == [manifest.files[-1].pieces[1]]
    store.adopt(manifest)
    store.put(manifest.digest, manifest.files[-1].pieces[1], pieces[manifest.files[-1].pieces[1]])
    assert store.has(manifest.digest)
    assert (files / "train" / "large.bin").read_bytes() == (source / "train" / "large.bin").read_bytes()


def test_files_are_read_back_again_only_after_they_changed(
    source: Path, store: BundleStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = store.add(source)
    large = store.open_files(manifest.digest) / "train" / "large.bin"
    store.read_back(manifest.digest)
    times = large.stat()
    damage(large, 5)
    os.utime(large, ns=(times.st_atime_ns, times.st_mtime_ns))  # as a disk fails: nobody wrote
    store.read_back(manifest.digest)
    assert store.has(manifest.digest)
    monkeypatch.setattr("psutil.boot_time", lambda: time.time() + 5)  # the machine was started
    store.read_back(manifest.digest)
    assert not store.has(manifest.digest)


def make(folder: Path, number: int, size: int) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{number}.bin"
    path.write_bytes(random.Random(number).randbytes(size))
    return path


def test_a_full_cache_loses_the_bundles_unused_for_longest_but_never_one_in_use(tmp_path: Path) -> None:
    cache = BundleStore(tmp_path / "bundles", limit_bytes=3_500_000)
    digests = [cache.add(make(tmp_path / "s", number, 1_000_000)).digest for number in range(3)]
    for age, digest in zip((300, 200, 100), digests, strict=True):
        used = tmp_path / "bundles" / digest[7:] / "in-use"
        os.utime(used, (used.stat().st_atime, used.stat().st_mtime - age))
    with cache.using(digests[0]):
        os.utime(tmp_path / "bundles" / digests[0][7:] / "in-use", (0, 0))
        cache.make_room(1_000_000)
        assert [cache.has(digest) for digest in digests] == [True, False, True]
        with pytest.raises(BundleError, match=r"in use\. Raise COMPUTESHARE_CACHE"):
            cache.make_room(3_000_000)
    assert cache.has(digests[0]) and not cache.has(digests[2])


def test_a_cache_never_removes_what_the_control_plane_keeps(tmp_path: Path) -> None:
    kept = BundleStore(tmp_path / "bundles").add(make(tmp_path / "s", 1, 1_000_000)).digest
    cache = BundleStore(tmp_path / "bundles", limit_bytes=1_500_000)
    fetched = cache.add(make(tmp_path / "s", 2, 1_000_000)).digest
    cache.make_room(1_400_000)
    assert cache.has(kept) and not cache.has(fetched)


def test_the_control_plane_removes_what_nobody_names_after_a_day(tmp_path: Path) -> None:
    store = BundleStore(tmp_path / "bundles")
    named, unnamed, young = (store.add(make(tmp_path / "s", number, 1000)).digest for number in range(3))
    cached = BundleStore(tmp_path / "bundles", limit_bytes=10**9).add(make(tmp_path / "s", 9, 1000)).digest
    for digest in (named, unnamed, cached):
        os.utime(tmp_path / "bundles" / digest[7:] / "in-use", (0, 0))
    assert store.remove_unnamed({named}) == [unnamed]
    assert set(store.digests()) == {named, young, cached}


def test_a_bundle_in_use_is_not_removed(tmp_path: Path) -> None:
    store = BundleStore(tmp_path / "bundles")
    digest = store.add(make(tmp_path / "s", 1, 1000)).digest
    with store.using(digest):
        assert not store.remove(digest)
        assert store.has(digest)
    assert store.remove(digest) and not store.has(digest) and store.digests() == []


def test_a_cache_takes_half_of_what_is_free_or_what_its_owner_allows(tmp_path: Path) -> None:
    assert cache_limit(tmp_path, 7) == 7
    assert 0 < cache_limit(tmp_path, 0) <= CACHE_BYTES


@pytest.mark.parametrize("name", ["what: ever", "back\\slash"])
def test_a_file_with_a_name_that_not_every_system_takes_is_named(name: str, tmp_path: Path, store: BundleStore) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / name).touch()
    with pytest.raises(BundleError, match="rename it"):
        store.add(tmp_path / "s")


def test_a_folder_without_files_is_told(tmp_path: Path, store: BundleStore) -> None:
    with pytest.raises(BundleError, match="no files in"):
        store.add(tmp_path / "nowhere")


def test_a_manifest_survives_its_way_as_text(source: Path) -> None:
    assert Manifest.parse(described(source).content).digest == described(source).digest
