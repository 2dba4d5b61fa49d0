"""Downloading a data set: once on a machine, and never half."""

import gzip
import hashlib
import http.server
import io
import os
import signal
import socket
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from computeshare.errors import DatasetError
from computeshare.tasks.images.datasets import cifar, idx
from computeshare.tasks.images.datasets.definitions import DEFINITIONS
from computeshare.tasks.images.datasets.splits import prepare, sources
from tests.support.image_files import idx_bytes, pickled_batch

FILES = {
    "train-images-idx3-ubyte": idx_bytes(np.arange(24, dtype=np.uint8).reshape(2, 3, 4)),
    "train-labels-idx1-ubyte": idx_bytes(np.array([7, 1], np.uint8)),
    "t10k-images-idx3-ubyte": idx_bytes(np.arange(12, dtype=np.uint8).reshape(1, 3, 4)),
    "t10k-labels-idx1-ubyte": idx_bytes(np.array([4], np.uint8)),
}
FOLDER = DEFINITIONS["cifar10"].folder


class Mirror:
    """Serves files on this machine, notes what was asked for, and can hang in the middle of one."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.asked = files, list[str]()
        self.hang_in, self.hanging, self.release = "", threading.Event(), threading.Event()
        mirror = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.lstrip("/")
                body = mirror.files[name]
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if name == mirror.hang_in:
                    self.wfile.write(body[: len(body) // 2])
                    mirror.hanging.set()
                    mirror.release.wait(60)
                    return
                mirror.asked.append(name)
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.release.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    """KMNIST, of three images, on this machine, with torchvision pointed at it."""
    from torchvision import datasets

    compressed = {f"{name}.gz": gzip.compress(body) for name, body in FILES.items()}
    served = Mirror(compressed)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(datasets.KMNIST, "mirrors", [served.url])
    sums = [(name, hashlib.md5(body).hexdigest()) for name, body in compressed.items()]
    monkeypatch.setattr(datasets.KMNIST, "resources", sums)
    yield served
    served.close()


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"}


WHOLE = {f"KMNIST/raw/{name}" for name in FILES}


def test_workers_that_start_together_download_once(mirror: Mirror, tmp_path: Path) -> None:
    prepare("kmnist", tmp_path / "alone")
    once = sorted(mirror.asked)
    mirror.asked.clear()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: prepare("kmnist", tmp_path / "together"), range(4)))
    assert sorted(mirror.asked) == once
    assert names(tmp_path / "together") == WHOLE
    assert idx.read_split(tmp_path / "together" / "KMNIST" / "raw", "test")[1].tolist() == [4]


def test_only_what_is_missing_is_put_in_place(mirror: Mirror, tmp_path: Path) -> None:
    raw = tmp_path / "KMNIST" / "raw"
    raw.mkdir(parents=True)
    (raw / "train-labels-idx1-ubyte").write_bytes(idx_bytes(np.array([5, 5], np.uint8)))
    prepare("kmnist", tmp_path)
    assert idx.read_split(raw, "train")[1].tolist() == [5, 5]
    assert names(tmp_path) == WHOLE


def test_a_damaged_file_is_reported_and_left_to_its_owner(mirror: Mirror, tmp_path: Path) -> None:
    prepare("kmnist", tmp_path)
    path = tmp_path / "KMNIST" / "raw" / "t10k-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DatasetError, match=f"{path.name} .*delete it"):
        prepare("kmnist", tmp_path)
    path.unlink()
    prepare("kmnist", tmp_path)
    assert path.read_bytes() == FILES[path.name]


def test_a_file_with_another_checksum_is_not_put_in_place(mirror: Mirror, tmp_path: Path) -> None:
    mirror.files["t10k-labels-idx1-ubyte.gz"] = gzip.compress(idx_bytes(np.array([9], np.uint8)))
    with pytest.raises(DatasetError, match="download failed"):
        prepare("kmnist", tmp_path)
    assert names(tmp_path) == set()


def test_without_a_connection_the_error_names_what_is_missing(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision import datasets

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: refuses connections
        monkeypatch.setattr(datasets.KMNIST, "mirrors", [f"http://127.0.0.1:{unused.getsockname()[1]}/"])
        with pytest.raises(DatasetError, match=r"lacks train-images-idx3-ubyte.*check this machine's connection"):
            prepare("kmnist", tmp_path)
    assert names(tmp_path) == set()
    monkeypatch.setattr(datasets.KMNIST, "mirrors", [mirror.url])
    prepare("kmnist", tmp_path)
    assert names(tmp_path) == WHOLE


@pytest.mark.slow
def test_a_download_that_is_killed_leaves_nothing_that_looks_whole(mirror: Mirror, tmp_path: Path) -> None:
    from torchvision import datasets

    code = (
        "from pathlib import Path\n"
        "from torchvision import datasets\n"
        "from computeshare.tasks.images.datasets.splits import prepare\n"
        f"datasets.KMNIST.mirrors, datasets.KMNIST.resources = {[mirror.url]!r}, {datasets.KMNIST.resources!r}\n"
        f"prepare('kmnist', Path({str(tmp_path)!r}))\n"
    )
    mirror.hang_in = "t10k-images-idx3-ubyte.gz"
    child = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "no_proxy": "127.0.0.1"})
    assert mirror.hanging.wait(120)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not names(tmp_path) & WHOLE
    mirror.hang_in = ""
    prepare("kmnist", tmp_path)
    assert names(tmp_path) == WHOLE


def test_cifar_is_downloaded_and_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision import datasets

    images = np.random.default_rng(0).integers(0, 256, (2, 3072), dtype=np.uint8)
    blobs = {"train_1": pickled_batch(images, [3, 4]), "test_1": pickled_batch(images[:1], [5])}
    blobs["batches.meta"] = b"\x80\x02}(U\x0blabel_names](U\x03cateu."
    sums = {name: hashlib.md5(blob).hexdigest() for name, blob in blobs.items()}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, blob in blobs.items():
            member = tarfile.TarInfo(f"{FOLDER}/{name}")
            member.size = len(blob)
            archive.addfile(member, io.BytesIO(blob))
    mirror = Mirror({"cifar.tar.gz": buffer.getvalue()})
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    for name, value in {
        "url": f"{mirror.url}cifar.tar.gz",
        "tgz_md5": hashlib.md5(buffer.getvalue()).hexdigest(),
        "train_list": [["train_1", sums["train_1"]]],
        "test_list": [["test_1", sums["test_1"]]],
        "meta": {"filename": "batches.meta", "key": "label_names", "md5": sums["batches.meta"]},
    }.items():
        monkeypatch.setattr(datasets.CIFAR10, name, value)
    batches = {"train": {"train_1": sums["train_1"]}, "test": {"test_1": sums["test_1"]}}
    monkeypatch.setitem(cifar.BATCHES, "cifar10", batches)

    prepare("cifar10", tmp_path)
    mirror.close()
    prepare("cifar10", tmp_path)  # needs no connection any more
    folder = tmp_path / FOLDER
    assert names(folder) == {"train_1", "test_1", "computeshare-train.npy", "computeshare-test.npy"}
    stored, labels = cifar.read_split(folder, "train")
    assert np.array_equal(stored.reshape(2, 3072), images)
    assert labels.tolist() == [3, 4]
    cifar.converted(folder, "test").unlink()
    prepare("cifar10", tmp_path)  # from the batches, without a connection
    assert cifar.read_split(folder, "test")[1].tolist() == [5]


def test_every_quickly_read_set_that_is_not_bundled_has_addresses_to_be_had_from() -> None:
    from torchvision import datasets

    found = {name: sources(name) for name, one in DEFINITIONS.items() if one.files != "decoded"}
    assert found["digits"] == [] and found["mnist"] == datasets.MNIST.mirrors
    assert found["cifar10"] == [datasets.CIFAR10.url]
    assert all(url.startswith("http") for name, urls in found.items() if name != "digits" for url in urls or [""])


@pytest.mark.parametrize("name", list(cifar.BATCHES))
def test_the_checksums_of_cifar_are_torchvisions(name: str) -> None:
    from torchvision import datasets

    published = getattr(datasets, DEFINITIONS[name].published)
    assert cifar.BATCHES[name] == {"train": dict(published.train_list), "test": dict(published.test_list)}
    assert DEFINITIONS[name].folder == published.base_folder
