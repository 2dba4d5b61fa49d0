from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from computeshare.datasets import arrays
from computeshare.datasets.prepared import Prepared, quiet
from computeshare.errors import DatasetError
from computeshare.tasks.own.files import INPUTS, TARGETS

X = np.random.default_rng(0).normal(3, 2, (40, 5))
Y = np.arange(40) % 4


def prepare(source: Path, target: Path) -> Prepared:
    return arrays.prepare(source, target, 0, quiet)


def read(target: Path, split: str, name: str = INPUTS) -> np.ndarray:
    found: np.ndarray = np.load(target / split / name, mmap_mode="r", allow_pickle=False)
    return found


def test_an_undivided_file_is_split_by_class(tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", inputs=X, targets=Y)
    sizes = prepare(tmp_path / "in.npz", tmp_path / "out").sizes
    assert (sizes.train, sizes.test, sizes.shape, sizes.classes) == (36, 4, (5,), ("0", "1", "2", "3"))
    assert sorted(read(tmp_path / "out", "test", TARGETS)) == [0, 1, 2, 3]
    train = read(tmp_path / "out", "train")
    assert train.dtype == np.float32
    assert sizes.mean[0] == pytest.approx(train.mean(), rel=1e-4)


def test_keras_names_give_the_splits(tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", x_train=X[:30], y_train=Y[:30], x_test=X[30:], y_test=Y[30:])
    assert prepare(tmp_path / "in.npz", tmp_path / "out").sizes.test == 10
    assert (read(tmp_path / "out", "test") == X[30:].astype(np.float32)).all()


def test_a_folder_of_safetensors_gives_the_splits(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    save_file({"x": X[:30], "y": Y[:30]}, source / "train.safetensors")
    save_file({"x": X[30:], "y": Y[30:]}, source / "test.safetensors")
    assert arrays.is_arrays(source)
    assert prepare(source, tmp_path / "out").sizes.train == 30


def test_words_are_classes(tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", x=X, y=np.array(["dog", "cat"] * 20))
    assert prepare(tmp_path / "in.npz", tmp_path / "out").sizes.classes == ("cat", "dog")
    assert set(read(tmp_path / "out", "train", TARGETS).tolist()) == {0, 1}


@pytest.mark.parametrize("targets", [{"y": X[:, 0]}, {"y": Y - 1}, {"y": Y * 10**15}, {"y": np.stack([Y, Y], 1)}, {}])
def test_targets_that_are_no_classes_are_for_recipes(tmp_path: Path, targets: dict[str, np.ndarray]) -> None:
    np.savez(tmp_path / "in.npz", x=X, **targets)
    found = prepare(tmp_path / "in.npz", tmp_path / "out")
    assert found.sizes.classes == ()
    assert found.remarks[0].startswith("It is for recipes alone")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"x": X, "y": Y[:10]}, "must be as many"),
        ({"one": X}, "name the arrays inputs and targets"),
        ({"x": X, "data": X}, "name the arrays inputs and targets"),
        ({"y": Y}, "has no inputs"),
        ({"x": np.array([1j] * 20)}, "are complex128"),
        ({"x": np.full((20, 2), np.nan)}, "values that are no numbers"),
        ({"x": X[:5]}, "too few .* give at least 10, or"),
        ({"x_train": X, "y_train": Y, "x_test": X[:, :3], "y_test": Y}, "differ in shape"),
    ],
)
def test_other_arrays_are_refused(tmp_path: Path, content: dict[str, np.ndarray], message: str) -> None:
    np.savez(tmp_path / "in.npz", **content)
    with pytest.raises(DatasetError, match=message):
        prepare(tmp_path / "in.npz", tmp_path / "out")


def test_another_file_is_told_as_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("x,y\n1,2\n")
    with pytest.raises(DatasetError, match=r"in\.csv is neither a \.npz nor a \.safetensors file: give one, a folder"):
        prepare(tmp_path / "in.csv", tmp_path / "out")


def test_pickled_arrays_are_not_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", x=np.array([{}] * 20, dtype=object))
    with pytest.raises(DatasetError, match="cannot be read: it has pickled objects"):
        prepare(tmp_path / "in.npz", tmp_path / "out")
