"""Folders of images by class, made on the spot: classes differ in brightness under noise, so that a model learns."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image


def make_images(folder: Path, classes: Sequence[str], count: int, size: tuple[int, int] = (40, 30)) -> Path:
    """Write `count` JPEGs of a size (width, height) for each class into its folder; returns `folder`."""
    source = np.random.default_rng(0)
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            noise = source.integers(0, 60, (size[1], size[0], 3))
            light = 190 * number // max(1, len(classes) - 1)
            Image.fromarray((noise + light).astype(np.uint8)).save(folder / name / f"{index:04}.jpg")
    return folder
