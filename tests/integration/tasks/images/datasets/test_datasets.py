"""Data sets on disk: read without torchvision, checked, and never half there."""

import hashlib
import pickle
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from computeshare.errors import DatasetError
from computeshare.tasks.images.datasets import cifar, idx
from computeshare.tasks.images.datasets.definitions import DEFINITIONS, SPLITS, SplitName
from computeshare.tasks.images.datasets.splits import open_split, prepare
from tests.support.image_files import idx_bytes, pickled_batch


def write_sparse_idx(path: Path, shape: tuple[int, ...]) -> None:
    """A file of the full size, all zeros, that takes no space."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = struct.pack(f">I{len(shape)}I", 0x0800 + len(shape), *shape)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + int(np.prod(shape)))


@pytest.fixture
def mnist_like(tmp_path: Path) -> Path:
    """Two training and two test images of 3x4 pixels, in MNIST's layout."""
    for split in SPLITS:
        images, labels = idx.files(tmp_path, split)
        images.write_bytes(idx_bytes(np.arange(24, dtype=np.uint8).reshape(2, 3, 4)))
        labels.write_bytes(idx_bytes(np.array([7, 1], np.uint8)))
    return tmp_path


# idx files


def test_an_idx_file_is_read_as_it_was_written(mnist_like: Path) -> None:
    images, labels = idx.read_split(mnist_like, "test")
    assert np.array_equal(images, np.arange(24).reshape(2, 1, 3, 4))
    assert labels.tolist() == [7, 1]
    assert not images.flags.writeable


@pytest.mark.parametrize("split", SPLITS)
def test_a_missing_file_is_named(mnist_like: Path, split: SplitName) -> None:
    path = idx.files(mnist_like, split)[1]
    path.unlink()
    with pytest.raises(DatasetError, match=f"{path.name} is missing"):
        idx.read_split(mnist_like, split)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda blob: blob[:-1], "holds 39 bytes, but its header gives 40"),
        (lambda blob: blob + b"\0", "holds 41 bytes, but its header gives 40"),
        (lambda blob: blob[:10], "not an idx file of 3"),
        (lambda blob: b"", "not an idx file of 3"),
        (lambda blob: b"\x1f\x8b" + blob[2:], "not an idx file of 3"),
        (lambda blob: blob[:4] + b"\xff" * 12 + blob[16:], "but its header gives"),
        (lambda blob: idx_bytes(np.zeros(24, np.uint8)), "not an idx file of 3"),
        (lambda blob: idx_bytes(np.zeros((0, 3, 4), np.uint8)), "but its header gives"),
    ],
    ids=["short", "long", "cut in the header", "empty", "compressed", "absurd size", "labels", "no images"],
)
def test_a_damaged_file_is_named_with_what_to_do(mnist_like: Path, damage: object, words: str) -> None:
    path = idx.files(mnist_like, "train")[0]
    assert callable(damage)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DatasetError, match=f"{path.name} .*{words}.*: delete it"):
        idx.read_split(mnist_like, "train")


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "kmnist"])
def test_a_split_of_the_full_size_opens(tmp_path: Path, name: str) -> None:
    folder = tmp_path / {"mnist": "MNIST", "fashion-mnist": "FashionMNIST", "kmnist": "KMNIST"}[name] / "raw"
    write_sparse_idx(folder / "t10k-images-idx3-ubyte", (10_000, 28, 28))
    write_sparse_idx(folder / "t10k-labels-idx1-ubyte", (10_000,))
    split = open_split(name, "test", tmp_path, (1, 28, 28))
    images, labels = split.batch(np.array([0, 9_999]))
    assert len(split) == 10_000
    assert images.shape == (2, 1, 28, 28)
    assert labels.tolist() == [0, 0]


def test_a_split_of_another_size_than_the_catalogs_is_refused(tmp_path: Path) -> None:
    write_sparse_idx(tmp_path / "MNIST/raw/t10k-images-idx3-ubyte", (9_999, 28, 28))
    write_sparse_idx(tmp_path / "MNIST/raw/t10k-labels-idx1-ubyte", (10_000,))
    with pytest.raises(DatasetError, match=r"mnist's test split .*9999, 1, 28, 28.* not \(10000, 1, 28, 28\)"):
        open_split("mnist", "test", tmp_path, (1, 28, 28))


def test_a_label_that_no_class_has_is_refused(tmp_path: Path) -> None:
    write_sparse_idx(tmp_path / "MNIST/raw/t10k-images-idx3-ubyte", (10_000, 28, 28))
    (tmp_path / "MNIST/raw/t10k-labels-idx1-ubyte").write_bytes(idx_bytes(np.full(10_000, 10, np.uint8)))
    with pytest.raises(DatasetError, match="has a label 10"):
        open_split("mnist", "test", tmp_path, (1, 28, 28))


def test_an_unknown_data_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"known: caltech101, .*digits"):
        open_split("imagenet21k", "train", tmp_path, (1, 8, 8))


# digits


def test_digits_are_divided_once_and_for_all(tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    train, test = (open_split("digits", split, tmp_path, (1, 8, 8)) for split in SPLITS)
    assert (len(train), len(test)) == (1437, 360)
    together = np.concatenate([train.images, test.images]).reshape(-1, 64)
    bundled = load_digits().images.reshape(-1, 64)
    assert sorted(map(bytes, together)) == sorted(map(bytes, bundled.astype(np.uint8)))
    digest = hashlib.sha256(train.images.tobytes() + train.labels.astype("<i8").tobytes()).hexdigest()
    assert digest[:16] == "72bd5a175461997d"


def test_digits_are_normalised(tmp_path: Path) -> None:
    split = open_split("digits", "train", tmp_path, (1, 8, 8))
    images, _ = split.batch(np.arange(len(split)))
    assert abs(images.mean().item()) < 0.02
    assert abs(images.std().item() - 1) < 0.02


# CIFAR-10

BATCH = np.random.default_rng(0).integers(0, 256, (3, 3072), dtype=np.uint8)


def published(folder: Path, count: int) -> dict[str, str]:
    """Write `count` batches; their names and MD5 sums."""
    sums = {}
    for number in range(count):
        blob = pickled_batch(BATCH + np.uint8(number), [number, 8, 9])
        (folder / f"batch_{number}").write_bytes(blob)
        sums[f"batch_{number}"] = hashlib.md5(blob).hexdigest()
    return sums


def test_batches_become_one_memory_mapped_file(tmp_path: Path) -> None:
    cifar.convert(tmp_path, published(tmp_path, 2), cifar.converted(tmp_path, "train"))
    images, labels = cifar.read_split(tmp_path, "train")
    assert np.array_equal(images.reshape(6, 3072), np.concatenate([BATCH, BATCH + np.uint8(1)]))
    assert labels.tolist() == [0, 8, 9, 1, 8, 9]
    assert {path.name for path in tmp_path.iterdir()} == {"batch_0", "batch_1", "computeshare-train.npy"}


def test_a_batch_that_is_not_the_published_one_is_not_even_unpickled(tmp_path: Path) -> None:
    sums = published(tmp_path, 2)
    (tmp_path / "batch_1").write_bytes(b"cbuiltins\nprint\n(S'unpickled'\ntR.")
    with pytest.raises(DatasetError, match="batch_1 is not the published file"):
        cifar.convert(tmp_path, sums, cifar.converted(tmp_path, "train"))
    assert not cifar.converted(tmp_path, "train").exists()


class _Touch:
    """Unpickling this with the standard library creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def test_the_unpickler_runs_nothing(tmp_path: Path) -> None:
    target = tmp_path / "touched"
    blob = pickle.dumps(_Touch(target))
    with pytest.raises(DatasetError, match="is not allowed"):
        cifar.loads(blob)
    assert not target.exists()
    pickle.loads(blob)
    assert target.exists()


@pytest.mark.parametrize(
    "blob", [b"", b"\x80\x02", b"cnumpy\nload\n.", b"cnumpy.core.multiarray\nfromfile\n.", b"garbage"]
)
def test_anything_but_arrays_and_containers_is_refused(blob: bytes) -> None:
    with pytest.raises(DatasetError, match="not a pickle of arrays"):
        cifar.loads(blob)


def test_arrays_pickled_by_numpy_2_are_read_too() -> None:
    assert np.array_equal(cifar.loads(pickle.dumps({"data": BATCH}, protocol=4))["data"], BATCH)


def test_a_converted_file_that_is_damaged_is_refused(tmp_path: Path) -> None:
    path = cifar.converted(tmp_path, "test")
    with pytest.raises(DatasetError, match="is missing"):
        cifar.read_split(tmp_path, "test")
    cifar.convert(tmp_path, published(tmp_path, 1), path)
    blob = path.read_bytes()
    for damaged in (blob[:-1], blob[:50], b"", pickle.dumps(BATCH)):
        path.write_bytes(damaged)
        with pytest.raises(DatasetError, match="delete it to have it made again"):
            cifar.read_split(tmp_path, "test")
    np.save(path, BATCH)
    with pytest.raises(DatasetError, match="does not hold CIFAR's records"):
        cifar.read_split(tmp_path, "test")


def test_a_full_cifar_split_opens_and_is_normalised(tmp_path: Path) -> None:
    definition = DEFINITIONS["cifar10"]
    folder = tmp_path / definition.folder
    folder.mkdir()
    record = np.dtype([("label", np.uint8), ("image", np.uint8, (3, 32, 32))])
    records = np.lib.format.open_memmap(cifar.converted(folder, "test"), "w+", record, (10_000,))
    records[5] = (3, np.full((3, 32, 32), 255))
    records.flush()
    images, labels = open_split("cifar10", "test", tmp_path, (3, 32, 32)).batch(np.array([5, 4]))
    assert labels.tolist() == [3, 0]
    mean, std = (
        torch.tensor(values).reshape(3, 1, 1).expand(3, 32, 32) for values in (definition.mean, definition.std)
    )
    torch.testing.assert_close(images, torch.stack([(1 - mean) / std, -mean / std]))


# Real MNIST


def test_real_mnist_opens_without_torchvision(mnist_dir: Path) -> None:
    code = (
        "import sys, numpy as np\n"
        "from pathlib import Path\n"
        "from computeshare.tasks.images.datasets.splits import open_split, prepare\n"
        f"data = Path({str(mnist_dir)!r})\n"
        "prepare('mnist', data)\n"
        "split = open_split('mnist', 'train', data, (1, 28, 28))\n"
        "images, labels = split.batch(np.arange(60000))\n"
        "assert abs(images.mean()) < 1e-3 and abs(images.std() - 1) < 1e-3\n"
        "assert labels[:5].tolist() == [5, 0, 4, 1, 9]\n"
        "sys.exit('torchvision' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_preparing_what_is_there_writes_nothing(mnist_like: Path, tmp_path: Path) -> None:
    raw = tmp_path / "data" / "KMNIST" / "raw"
    raw.mkdir(parents=True)
    for path in mnist_like.glob("*-ubyte"):
        path.rename(raw / path.name)
    before = sorted((tmp_path / "data").rglob("*"))
    prepare("kmnist", tmp_path / "data")
    prepare("digits", tmp_path / "nowhere")
    assert sorted((tmp_path / "data").rglob("*")) == before
    assert not (tmp_path / "nowhere").exists()
