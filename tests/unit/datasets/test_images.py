from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from computeshare.datasets import images
from computeshare.datasets.prepared import Prepared, quiet
from computeshare.errors import DatasetError
from computeshare.tasks.images import files
from computeshare.tasks.images.datasets import prepared
from computeshare.tasks.own.files import IMAGES


def save(path: Path, mode: str = "RGB", size: tuple[int, int] = (40, 30), colour: int = 200, **options: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", size, colour).convert(mode).save(path, **options)


def make(folder: Path, counts: Mapping[str, int], **options: object) -> Path:
    for name, count in counts.items():
        for number in range(count):
            save(folder / name / f"{number:03}.jpg", colour=40 + number, **options)
    return folder


def prepare(source: Path, target: Path, side: tuple[int, int] | None = None, seed: int = 0) -> Prepared:
    return images.prepare(source, target, side, seed, quiet)


def test_a_tenth_of_each_class_is_set_aside_by_the_seed(tmp_path: Path) -> None:
    source = make(tmp_path / "in", {"cat": 20, "dog": 10})
    sizes = prepare(source, tmp_path / "out").sizes
    assert (sizes.train, sizes.test, sizes.classes) == (27, 3, ("cat", "dog"))
    pixels, labels = prepared.read(tmp_path / "out" / "test" / IMAGES)
    assert labels.tolist() == [0, 0, 1]
    again, other = tmp_path / "again", tmp_path / "other"
    prepare(source, again)
    prepare(source, other, seed=1)
    assert (prepared.read(again / "test" / IMAGES)[0] == pixels).all()
    assert (prepared.read(other / "test" / IMAGES)[0] != pixels).any()


def test_folders_train_and_test_are_the_splits(tmp_path: Path) -> None:
    source = tmp_path / "in"
    make(source / "train", {"cat": 3, "dog": 2})
    make(source / "test", {"dog": 1})
    found = prepare(source, tmp_path / "out")
    assert (found.sizes.train, found.sizes.test, found.remarks) == (5, 1, ())


def test_a_class_that_only_the_test_folder_has_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "in" / "train", {"cat": 3, "dog": 2})
    make(tmp_path / "in" / "val", {"cow": 1})
    with pytest.raises(DatasetError, match="has classes that the training folder has not: cow"):
        prepare(tmp_path / "in", tmp_path / "out")


def test_images_of_any_mode_and_size_are_resized_as_prediction_does_it(tmp_path: Path) -> None:
    source = tmp_path / "in"
    noise = np.random.default_rng(0).integers(0, 256, (50, 70, 3), np.uint8)
    (source / "train" / "a").mkdir(parents=True)
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.fromarray(noise).save(source / "train" / "a" / "turned.jpg", exif=turned)
    Image.fromarray(noise).convert("CMYK").save(source / "train" / "a" / "print.jpg")
    save(source / "train" / "b" / "palette.gif", "P", (90, 20))
    save(source / "train" / "b" / "clear.png", "RGBA", (33, 33))
    save(source / "train" / "b" / "deep.png", "I;16", (20, 60))
    save(source / "test" / "a" / "one.webp")
    found = prepare(source, tmp_path / "out", (24, 32))
    assert found.sizes.shape == (3, 24, 32)
    pixels, _ = prepared.read(tmp_path / "out" / "train" / IMAGES)
    names = ["a/print.jpg", "a/turned.jpg", "b/clear.png", "b/deep.png", "b/palette.gif"]
    for index, name in enumerate(names):
        assert (pixels[index] == files.read(source / "train" / name, (3, 24, 32))).all(), name


def test_grey_images_have_one_channel_and_keep_a_size_that_all_share(tmp_path: Path) -> None:
    source = tmp_path / "in"
    make(source, {"a": 6, "b": 6}, mode="L", size=(28, 20))
    sizes = prepare(source, tmp_path / "out").sizes
    assert sizes.shape == (1, 20, 28)
    assert len(sizes.mean) == len(sizes.std) == 1
    assert 0 < sizes.mean[0] < 1


@pytest.mark.parametrize(("side", "guess"), [(20, 28), (100, 96), (1000, 224)])
def test_sides_are_guessed_from_the_usual_image(tmp_path: Path, side: int, guess: int) -> None:
    make(tmp_path / "in", {"a": 6, "b": 5}, size=(side, side + 9))
    save(tmp_path / "in" / "b" / "odd.png", size=(5, 7))
    assert prepare(tmp_path / "in", tmp_path / "out").sizes.shape == (3, guess, guess)


def test_broken_images_are_named_and_left_out(tmp_path: Path) -> None:
    source = make(tmp_path / "in", {"a": 10, "b": 10})
    whole = (source / "a" / "000.jpg").read_bytes()
    (source / "a" / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (source / "b" / "empty.png").touch()
    (source / "b" / "phone.heic").write_bytes(b"\0" * 100)
    found = prepare(source, tmp_path / "out")
    assert found.sizes.train + found.sizes.test == 20
    told = " ".join(found.remarks)
    assert all(name in told for name in ("a/cut.jpg", "b/empty.png", "b/phone.heic"))


def test_too_many_broken_images_are_an_error(tmp_path: Path) -> None:
    source = make(tmp_path / "in", {"a": 10, "b": 10})
    for number in range(11):
        (source / "a" / f"x{number}.jpg").write_bytes(b"no image")
    with pytest.raises(DatasetError, match="more than 10 of 31 files cannot be read"):
        prepare(source, tmp_path / "out")


def test_class_names_are_the_same_whatever_system_made_the_folders(tmp_path: Path) -> None:
    make(tmp_path / "mac", {"Cafe\u0301": 6, "日本": 6})
    make(tmp_path / "linux", {"Caf\u00e9": 6, "日本": 6})
    mac, linux = (prepare(tmp_path / one, tmp_path / f"{one}-out") for one in ("mac", "linux"))
    assert mac.sizes == linux.sizes
    assert mac.sizes.classes == ("Caf\u00e9", "日本")


def test_folders_that_differ_in_case_alone_are_refused(tmp_path: Path) -> None:
    make(tmp_path / "in", {"Cat": 6, "cat": 6, "dog": 6})
    with pytest.raises(DatasetError, match=r"classes Cat and cat, which differ in case alone"):
        prepare(tmp_path / "in", tmp_path / "out")
    make(tmp_path / "split" / "train", {"Cat": 6, "dog": 6})
    make(tmp_path / "split" / "test", {"cat": 6})
    with pytest.raises(DatasetError, match="differ in case alone"):
        prepare(tmp_path / "split", tmp_path / "out")


def test_what_is_no_image_of_a_class_is_told_and_left_out(tmp_path: Path) -> None:
    source = make(tmp_path / "in", {"a": 6, "b": 6})
    (source / "a" / "notes.txt").write_text("x")
    (source / "a" / ".DS_Store").touch()
    save(source / "stray.png")
    (remark,) = prepare(source, tmp_path / "out").remarks
    assert remark.startswith("Left out 2 files that are no images in a class's folder")
    assert "notes.txt" in remark and "stray.png" in remark


def test_a_single_class_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="a classifier needs 2"):
        prepare(make(tmp_path / "in", {"a": 12}), tmp_path / "out")
    (tmp_path / "flat").mkdir()
    save(tmp_path / "flat" / "one.png")
    with pytest.raises(DatasetError, match="no folders with images"):
        prepare(tmp_path / "flat", tmp_path / "out")


def test_progress_reaches_the_whole(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    source = make(tmp_path / "in", {"a": 6, "b": 6})
    images.prepare(source, tmp_path / "out", None, 0, lambda *one: told.append(one))
    assert told[-1] == ("images", 12, 12)
    assert len(told) == 12


@pytest.mark.parametrize(("text", "size"), [("96", (96, 96)), ("96x128", (96, 128))])
def test_sizes_are_read(text: str, size: tuple[int, int]) -> None:
    assert images.size_of(text) == size


@pytest.mark.parametrize("text", ["", "0", "9x9x9", "big", "5000"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        images.size_of(text)
