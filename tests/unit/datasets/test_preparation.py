from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from computeshare.datasets.preparation import guessed, prepare
from computeshare.errors import DatasetError


def picture(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (4, 4)).save(path)


def test_plain_kinds_are_guessed(tmp_path: Path) -> None:
    picture(tmp_path / "pictures" / "cat" / "one.png")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").touch()
    np.savez(tmp_path / "table.npz", x=np.zeros(3))
    kinds = [guessed(tmp_path / name) for name in ("pictures", "texts", "texts/one.txt", "table.npz")]
    assert kinds == ["images", "text", "text", "arrays"]


def test_other_data_need_a_kind(tmp_path: Path) -> None:
    (tmp_path / "one.bin").touch()
    for source in (tmp_path, tmp_path / "one.bin"):
        with pytest.raises(DatasetError, match="give --kind images, text, arrays or files"):
            guessed(source)


def test_empty_folders_and_images_without_classes_are_told_as_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "none" / "class").mkdir(parents=True)
    picture(tmp_path / "flat" / "one.png")
    for name, told in (("none", "has no files"), ("flat", "put the images of each class into a folder")):
        with pytest.raises(DatasetError, match=told):
            prepare(tmp_path / name, tmp_path / "out")


def test_files_stay_where_they_are(tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    (source / "a.bin").touch()
    (source / ".hidden").touch()
    found = prepare(source, target, "files")
    assert (found.folder, found.sizes.train, found.kind) == (source, 1, "files")
    assert not target.exists()


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="there is no file or folder"):
        prepare(tmp_path / "nowhere", tmp_path / "out")
