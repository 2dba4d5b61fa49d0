"""Data sets that torchvision reads: every one of its classes, and files in its layout decoded once."""

import csv
import hashlib
import inspect
import os
import pathlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import scipy.io
from PIL import Image

from computeshare.errors import DatasetError
from computeshare.jobspec.catalog import dataset_names
from computeshare.jobspec.spec import JobSpec
from computeshare.tasks.images.datasets import splits, torchvision_sets
from computeshare.tasks.images.datasets.definitions import DEFINITIONS, NOT_OFFERED, SPLITS, Shape
from computeshare.tasks.images.datasets.splits import open_split, prepare, prepared_path
from computeshare.tasks.registry import task_of

COLOURS = np.random.default_rng(0).integers(0, 256, (64, 3), dtype=np.uint8)


def colour(number: int) -> tuple[int, ...]:
    return tuple(map(int, COLOURS[number]))


def save(path: Path, number: int, size: tuple[int, int] = (8, 8)) -> None:
    """An image of one colour, `size` being width and height."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour(number)).save(path, quality=100, subsampling=0)


def sized(monkeypatch: pytest.MonkeyPatch, name: str, **smaller: Any) -> None:
    """Give a data set the sizes of the few files that a test makes."""
    monkeypatch.setitem(DEFINITIONS, name, replace(DEFINITIONS[name], **smaller))


# torchvision's classes


def test_every_class_of_torchvision_can_be_named_or_says_why_not() -> None:
    from torchvision import datasets as published

    classes = {name for name in published.__all__ if inspect.isclass(getattr(published, name))}
    offered = {one.published for one in DEFINITIONS.values() if one.published}
    assert offered | set(NOT_OFFERED) == classes
    assert not offered & set(NOT_OFFERED)
    assert {name.lower() for name in offered} <= set(dataset_names())


@pytest.mark.parametrize("name", [name for name, one in DEFINITIONS.items() if one.published])
def test_a_sets_arguments_are_those_of_its_class(name: str, tmp_path: Path) -> None:
    from torchvision import datasets as published

    definition = DEFINITIONS[name]
    known = set(parameters_of(getattr(published, definition.published)))
    assert definition.by_hand or "download" in known
    for split in SPLITS:
        assert {"root", *definition.arguments(split)} <= known
        with pytest.raises((OSError, RuntimeError)):  # no files; a wrong value would be a ValueError
            torchvision_sets.open_split(definition, split, tmp_path)
    differs = definition.arguments("train") != definition.arguments("test")
    assert differs == (definition.test_arguments is not None)


def parameters_of(published: type) -> Iterator[str]:
    """The parameters of a constructor; those of its parent too, if it hands any others on."""
    for one in published.__mro__:
        parameters = inspect.signature(one.__init__).parameters
        yield from parameters
        if all(parameter.kind != parameter.VAR_KEYWORD for parameter in parameters.values()):
            return


# Files that torchvision reads


def test_svhn_is_read_from_its_matrices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sized(monkeypatch, "svhn", train=3, test=2)
    pixels = write_svhn(tmp_path, monkeypatch)
    prepare("svhn", tmp_path)
    train, test = (open_split("svhn", split, tmp_path, (3, 32, 32)) for split in SPLITS)
    assert np.array_equal(train.images, pixels["train"]) and np.array_equal(test.images, pixels["test"])
    assert train.labels.tolist() == [1, 0, 9]  # the files have 10 for the digit 0
    assert test.labels.tolist() == [1, 0]
    images, labels = train.batch(np.array([2, 0]))
    assert images.shape == (2, 3, 32, 32) and labels.tolist() == [9, 1]


def write_svhn(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Files of three training and two test images, which torchvision takes for the published ones; their pixels."""
    from torchvision.datasets import SVHN

    pixels, listed = {}, {}
    folder.mkdir(exist_ok=True)
    for split, count in (("train", 3), ("test", 2)):
        pixels[split] = np.random.default_rng(count).integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)
        path = folder / f"{split}_32x32.mat"
        labels = np.array([[1], [10], [9]][:count], np.uint8)
        scipy.io.savemat(path, {"X": pixels[split].transpose(2, 3, 1, 0), "y": labels})
        listed[split] = [f"http://127.0.0.1:9/{path.name}", path.name, hashlib.md5(path.read_bytes()).hexdigest()]
    monkeypatch.setattr(SVHN, "split_list", listed)
    return pixels


@pytest.fixture
def pets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four training and three test pets, of which no two images have the same size."""
    sized(monkeypatch, "oxfordiiitpet", train=4, test=3, shape=(3, 8, 8))
    folder = tmp_path / "oxford-iiit-pet"
    (folder / "annotations").mkdir(parents=True)
    for split, numbers in (("trainval", range(4)), ("test", range(4, 7))):
        lines = []
        for number in numbers:
            save(folder / "images" / f"cat_{number}.jpg", number, (10 + number, 30 - number))
            lines.append(f"cat_{number} {1 + number % 37} 1 1\n")
        (folder / "annotations" / f"{split}.txt").write_text("".join(lines))
    return tmp_path


@pytest.mark.parametrize("shape", [(3, 8, 8), (3, 12, 6), (1, 4, 4)])
def test_images_of_varying_size_are_resized_once_to_the_jobs_input(pets: Path, shape: Shape) -> None:
    prepare("oxfordiiitpet", pets, shape)
    split = open_split("oxfordiiitpet", "test", pets, shape)
    assert split.images.shape == (3, 3, *shape[1:]) and split.labels.tolist() == [4, 5, 6]
    expected = COLOURS[4:7].reshape(3, 3, 1, 1).astype(int)
    assert np.abs(split.images - expected).max() <= 2  # JPEG
    assert split.batch(np.array([1]))[0].shape == (1, *shape)


def test_a_job_trains_on_images_of_its_input(pets: Path) -> None:
    spec = JobSpec(dataset="OxfordIIITPet", model="mlp", input=(3, 12, 6))
    instance = task_of(spec).instance(0, "train", pets)
    images, labels = instance.split.batch(np.arange(4))
    assert images.shape == (4, 3, 12, 6) and labels.tolist() == [0, 1, 2, 3]
    assert instance.module(images).shape == (4, 37)


def test_images_are_decoded_once(pets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = list[str]()
    real = torchvision_sets.open_split

    def counted(definition: Any, split: Any, data_dir: Path, **options: Any) -> Any:
        opened.append(split)
        return real(definition, split, data_dir, **options)

    monkeypatch.setattr(torchvision_sets, "open_split", counted)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: prepare("oxfordiiitpet", pets), range(4)))
    assert sorted(opened) == ["test", "train"]
    (pets / "oxford-iiit-pet").rename(pets / "elsewhere")
    prepare("oxfordiiitpet", pets)
    assert sorted(opened) == ["test", "train"]
    assert len(open_split("oxfordiiitpet", "train", pets, (3, 8, 8))) == 4
    assert sorted(path.name.split("-")[1] for path in (pets / "prepared").iterdir()) == ["test"] * 2 + ["train"] * 2


def test_a_set_published_undivided_is_divided_by_a_fixed_shuffle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sized(monkeypatch, "eurosat", train=18, test=2, shape=(3, 8, 8))
    for number in range(20):
        save(tmp_path / "eurosat" / "2750" / f"class{number // 2}" / f"{number}.jpg", number)
    prepare("eurosat", tmp_path)
    train, test = (open_split("eurosat", split, tmp_path, (3, 8, 8)) for split in SPLITS)
    assert sorted([*train.labels, *test.labels]) == sorted(2 * list(range(10)))
    means = np.concatenate([train.images, test.images]).mean(axis=(2, 3))
    numbers = [int(np.abs(COLOURS[:20] - mean).sum(axis=1).argmin()) for mean in means]
    assert sorted(numbers) == list(range(20))
    assert [number // 2 for number in numbers] == [*train.labels, *test.labels]
    assert numbers != sorted(numbers)


def test_gtsrb_has_its_test_labels_in_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sized(monkeypatch, "gtsrb", train=2, test=2)
    folder = tmp_path / "gtsrb"
    for number in (0, 1):
        save(folder / "GTSRB" / "Training" / f"{number:05d}" / f"{number}.ppm", number, (20 + number, 40))
        save(folder / "GTSRB" / "Final_Test" / "Images" / f"{number}.ppm", number, (33, 20))
    with (folder / "GT-final_test.csv").open("w") as file:
        writer = csv.writer(file, delimiter=";")
        writer.writerows([["Filename", "ClassId"], ["0.ppm", 42], ["1.ppm", 7]])
    prepare("gtsrb", tmp_path)
    test = open_split("gtsrb", "test", tmp_path, (3, 32, 32))
    assert test.labels.tolist() == [42, 7]
    assert (test.images == COLOURS[:2].reshape(2, 3, 1, 1)).all()


def test_pcam_is_read_with_h5py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import PCAM

    sized(monkeypatch, "pcam", train=2, test=2)
    (tmp_path / "pcam").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (2, 96, 96, 3), dtype=np.uint8)
    for split in SPLITS:
        for key, values in (("x", pixels), ("y", np.array([1, 0], np.uint8).reshape(2, 1, 1, 1))):
            with h5py.File(
                tmp_path / "pcam" / PCAM._FILES[split]["images" if key == "x" else "targets"][0], "w"
            ) as file:
                file[key] = values
    prepare("pcam", tmp_path)
    train = open_split("pcam", "train", tmp_path, (3, 96, 96))
    assert np.array_equal(train.images, pixels.transpose(0, 3, 1, 2)) and train.labels.tolist() == [1, 0]


# The same order on every machine


@pytest.mark.parametrize("name", ["omniglot", "sun397", "inaturalist"])
def test_samples_are_in_the_same_order_whatever_the_file_system_lists_first(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    {"omniglot": write_omniglot, "sun397": write_sun397, "inaturalist": write_inaturalist}[name](tmp_path, monkeypatch)
    found = []
    real, globbed = os.listdir, pathlib.Path.rglob
    for backwards in (False, True):
        monkeypatch.setattr(os, "listdir", lambda path, _b=backwards: sorted(real(path), reverse=_b))
        monkeypatch.setattr(
            pathlib.Path, "rglob", lambda self, pattern, _b=backwards: sorted(globbed(self, pattern), reverse=_b)
        )
        samples = torchvision_sets.open_split(DEFINITIONS[name], "train", tmp_path)
        found.append(
            [(image.convert("RGB").getpixel((0, 0)), label) for image, label in map(samples.__getitem__, range(4))]
        )
    assert found[0] == found[1]
    assert [label for _, label in found[0]] == [0, 0, 1, 1]


def write_omniglot(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import Omniglot

    (folder / "omniglot-py").mkdir()
    (folder / "omniglot-py" / "images_background.zip").write_bytes(b"")
    monkeypatch.setattr(Omniglot, "zips_md5", {"images_background": hashlib.md5(b"").hexdigest()})
    for number in range(4):
        save(folder / "omniglot-py" / "images_background" / f"alphabet{number // 2}" / "one" / f"{number}.png", number)


def write_sun397(folder: Path, _: pytest.MonkeyPatch) -> None:
    for number in range(4):
        save(folder / "SUN397" / "a" / f"class{number // 2}" / f"sun_{number}.jpg", number)
    (folder / "SUN397" / "ClassName.txt").write_text("/a/class0\n/a/class1\n")


def write_inaturalist(folder: Path, _: pytest.MonkeyPatch) -> None:
    for number in range(4):
        save(folder / "2021_train" / f"{number // 2:05d}_a_b_c_d_e_f_g" / f"{number}.jpg", number)


# What can be wrong


def test_files_of_another_number_than_the_authors_are_refused(pets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sized(monkeypatch, "oxfordiiitpet", test=1000)
    with pytest.raises(DatasetError, match=r"oxfordiiitpet in .* has 3 test images, not 1,000: delete its files"):
        prepare("oxfordiiitpet", pets)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda image: image.write_bytes(image.read_bytes()[:200]), "train split: sample 2 cannot be read"),
        (lambda image: image.unlink(), "train split: sample 2 cannot be read: .*No such file"),
    ],
)
def test_a_damaged_image_is_named_and_leaves_no_prepared_file(pets: Path, damage: Any, says: str) -> None:
    damage(pets / "oxford-iiit-pet" / "images" / "cat_2.jpg")
    with pytest.raises(DatasetError, match=says):
        prepare("oxfordiiitpet", pets)
    assert list((pets / "prepared").iterdir()) == []


def test_a_label_beyond_the_classes_is_refused(pets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sized(monkeypatch, "oxfordiiitpet", classes=3)
    with pytest.raises(DatasetError, match="sample 3 cannot be read: its label is 3, not one of 0 to 2"):
        prepare("oxfordiiitpet", pets)


def test_a_damaged_prepared_file_is_refused(pets: Path) -> None:
    prepare("oxfordiiitpet", pets)
    path = prepared_path("oxfordiiitpet", DEFINITIONS["oxfordiiitpet"], "train", pets, (3, 8, 8))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DatasetError, match=r"is damaged .*: delete it to have it made again"):
        prepare("oxfordiiitpet", pets)
    path.unlink()
    prepare("oxfordiiitpet", pets)


def test_a_disk_too_small_for_the_images_is_told_before_they_are_decoded(
    pets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 100})())
    with pytest.raises(DatasetError, match=r"need 0\.0 GB .*: free some space, or set a smaller input"):
        prepare("oxfordiiitpet", pets)


def test_files_that_torchvision_cannot_download_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="lacks files of FER2013, which torchvision cannot download: copy them"):
        prepare("fer2013", tmp_path)


def test_a_download_that_fails_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    write_svhn(tmp_path / "other", monkeypatch)  # and so the addresses refuse connections
    with pytest.raises(DatasetError, match="lacks files of SVHN, and the download failed: check this machine's conn"):
        prepare("svhn", tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.name != ".svhn.lock"] == ["other"]


def test_a_set_that_needs_a_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sized(monkeypatch, "pcam", requires=("h5py", "no_such_package"))
    with pytest.raises(DatasetError, match=r"no_such_package: pip install 'computeshare\[data\]'"):
        prepare("pcam", tmp_path)


def test_what_is_missing_is_moved_into_place_and_what_is_there_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision.datasets import SVHN

    sized(monkeypatch, "svhn", train=3, test=2)
    write_svhn(tmp_path / "away", monkeypatch)

    def from_away(self: Any) -> None:  # in place of the network
        Path(self.root, self.filename).write_bytes((tmp_path / "away" / self.filename).read_bytes())

    monkeypatch.setattr(SVHN, "download", from_away)
    data = tmp_path / "data"
    data.mkdir()
    mine = data / "train_32x32.mat"
    mine.write_bytes((tmp_path / "away" / mine.name).read_bytes())
    written = mine.stat().st_mtime_ns, mine.stat().st_ino
    prepare("svhn", data)
    assert (mine.stat().st_mtime_ns, mine.stat().st_ino) == written
    assert {path.name for path in data.iterdir()} == {mine.name, "test_32x32.mat", "prepared", ".svhn.lock"}
    assert splits.sources("svhn") == []
