"""Bundles over REST: announced, uploaded piece by piece, resumed, and fetched by a worker of this control plane."""

import os
from pathlib import Path

import pytest
from redis import Redis
from starlette.testclient import TestClient

from computeshare import ComputeShare
from computeshare.bundles.exchange import fetch
from computeshare.bundles.manifest import PIECE_BYTES, Manifest
from computeshare.bundles.source import described, pieces_of
from computeshare.bundles.store import BundleStore
from computeshare.client.api.models import Problem
from computeshare.errors import BundleError
from computeshare.settings import Settings
from tests.support.served_api import serving

OCTETS = {"Content-Type": "application/octet-stream"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    (folder / "train").mkdir(parents=True)
    (folder / "train" / "large.bin").write_bytes(os.urandom(2 * PIECE_BYTES + 5))
    (folder / "notes.txt").write_text("hello")
    return folder


def announce(client: TestClient, manifest: Manifest) -> tuple[int, list[str]]:
    answer = client.post("/v1/bundles", content=manifest.content, headers={"Content-Type": "application/json"})
    assert answer.json()["digest"] == manifest.digest and answer.headers["location"].endswith(manifest.digest)
    return answer.status_code, answer.json()["missing"]


def test_a_bundle_is_uploaded_piece_by_piece(client: TestClient, source: Path) -> None:
    manifest = described(source)
    path = f"/v1/bundles/{manifest.digest}"
    assert client.get(path).status_code == 404
    assert announce(client, manifest) == (201, list(manifest.pieces()))
    for number, (piece, data) in enumerate(pieces_of(source, manifest)):
        assert announce(client, manifest) == (200, list(manifest.pieces())[number:])
        assert client.get(f"{path}/pieces/{piece}").status_code == 404
        assert client.put(f"{path}/pieces/{piece}", content=data, headers=OCTETS).status_code == 204
        got = client.get(f"{path}/pieces/{piece}")
        assert got.content == data and got.headers["content-type"] == "application/octet-stream"
    shown = client.get(path).json()
    assert shown["missing"] == [] and shown["bytes"] == manifest.bytes
    assert shown["files"] == manifest.model_dump(mode="json")["files"]


def test_a_damaged_bundle_that_is_announced_again_asks_for_what_is_damaged(
    client: TestClient, source: Path, settings: Settings
) -> None:
    manifest = BundleStore(settings.bundles_dir).add(source)
    damaged = settings.bundles_dir / manifest.digest[7:] / "files" / "notes.txt"
    damaged.write_text("jello")
    [piece] = manifest.files[0].pieces
    assert announce(client, manifest) == (200, [piece])
    client.put(f"/v1/bundles/{manifest.digest}/pieces/{piece}", content=b"hello", headers=OCTETS)
    assert announce(client, manifest) == (200, []) and damaged.read_text() == "hello"


def test_what_is_not_a_piece_is_refused(client: TestClient, source: Path) -> None:
    manifest = described(source)
    announce(client, manifest)
    piece, path = next(iter(manifest.pieces())), f"/v1/bundles/{manifest.digest}/pieces"
    wrong = client.put(f"{path}/{piece}", content=b"else", headers=OCTETS)
    assert wrong.status_code == 422 and "send it again" in wrong.json()["detail"]
    assert client.put(f"{path}/{'0' * 64}", content=b"else", headers=OCTETS).status_code == 404
    assert client.put(f"{path}/{piece}", content=bytes(PIECE_BYTES + 1), headers=OCTETS).status_code == 413
    assert announce(client, manifest)[1][0] == piece


@pytest.mark.parametrize("path", ["../../etc/passwd", "/etc/passwd", "a\\b"])
def test_a_path_that_leads_out_of_the_bundle_is_refused(path: str, client: TestClient, tmp_path: Path) -> None:
    answer = client.post("/v1/bundles", json={"files": [{"path": path, "size": 0, "pieces": []}]})
    assert answer.status_code == 422 and "plain relative paths" in answer.json()["detail"]
    assert not (tmp_path / "bundles").exists()


def test_the_client_uploads_a_folder_and_sends_nothing_twice(
    settings: Settings, source: Path, tmp_path: Path, redis: Redis
) -> None:
    with serving(settings) as (url, _), ComputeShare(url, "secret") as session:
        told: list[tuple[int, int]] = []

        def leave_after_the_first(done: int, total: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            session.upload_bundle(source, leave_after_the_first)
        digest = session.upload_bundle(source, lambda done, total: told.append((done, total)))
        size = described(source).bytes
        assert told[-1] == (size, size) and told[0][0] > 0
        assert (BundleStore(tmp_path / "bundles").open_files(digest) / "notes.txt").read_text() == "hello"
        (source / "notes.txt").write_text("jello")
        manifest = described(source)
        (source / "notes.txt").write_text("other")
        with pytest.raises(BundleError, match=r"notes\.txt changed while it was read"):
            list(pieces_of(source, manifest))
        with pytest.raises(Problem, match="no bundle"):
            session.client.bundles.show("sha256:" + "0" * 64)

        cache = BundleStore(tmp_path / "cache", 10**9)
        fetch(redis, cache, digest)
        assert (cache.open_files(digest) / "notes.txt").read_text() == "hello"
