"""Image files as pixels."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from computeshare.errors import InputError
from computeshare.tasks.images.files import read

MODES = ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("channels", [1, 3])
def test_every_mode_gives_the_same_light_and_dark_halves(tmp_path: Path, mode: str, channels: int) -> None:
    halves = np.repeat(np.uint8([[0, 255]]), 20, axis=1).repeat(30, axis=0)
    image = Image.fromarray(halves.astype(np.uint16) * 257) if mode == "I;16" else Image.fromarray(halves).convert(mode)
    path = tmp_path / "image.tif"
    image.save(path)
    pixels = read(path, (channels, 12, 16))
    assert pixels.shape == (channels, 12, 16) and pixels.dtype == np.uint8
    assert pixels[:, :, :6].max() < 5 and pixels[:, :, 10:].min() > 250


def test_an_image_is_cropped_about_its_centre_not_stretched(tmp_path: Path) -> None:
    wide = np.zeros((10, 50), np.uint8)
    wide[:, 20:30] = 200
    Image.fromarray(wide).save(tmp_path / "wide.png")
    assert (read(tmp_path / "wide.png", (1, 10, 10)) == 200).all()


def test_a_photo_is_turned_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise
    lower = np.zeros((8, 8, 3), np.uint8)
    lower[4:] = 255
    Image.fromarray(lower).save(tmp_path / "photo.png", exif=exif)
    pixels = read(tmp_path / "photo.png", (1, 8, 8))
    assert pixels[0, :, 0].min() == 255 and pixels[0, :, 7].max() == 0


def test_numbers_without_a_range_are_refused(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((4, 4), np.float32)).save(tmp_path / "f.tif")
    with pytest.raises(InputError, match="save it with 8 bits"):
        read(tmp_path / "f.tif", (1, 4, 4))


def test_a_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("L", (100, 100)).save(tmp_path / "bomb.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(InputError, match="too many pixels"):
        read(tmp_path / "bomb.png", (1, 8, 8))
