"""Pictures of ten kinds of shapes, hard enough that a small network does not get all of them right.

Each has a shape of its class at a random place, size, angle and colour, before a background that changes from side to
side, with lines across it and noise.
"""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

Array = npt.NDArray[np.float64]
SIDE = 64
NOISE = 0.08
"""Standard deviation of the noise; pixels are from 0 to 1."""


def _radius(x: Array, y: Array) -> Array:
    return np.hypot(x, y)


def _longer(x: Array, y: Array) -> Array:
    return np.maximum(abs(x), abs(y))


SHAPES: dict[str, Callable[[Array, Array], npt.NDArray[np.bool_]]] = {
    "disk": lambda x, y: _radius(x, y) < 1,
    "ring": lambda x, y: (_radius(x, y) < 1) & (_radius(x, y) > 0.6),
    "half": lambda x, y: (_radius(x, y) < 1) & (y > 0),
    "square": lambda x, y: _longer(x, y) < 0.85,
    "frame": lambda x, y: (_longer(x, y) < 0.85) & (_longer(x, y) > 0.5),
    "triangle": lambda x, y: (y > -0.5) & (y + 1.73 * abs(x) < 1),
    "cross": lambda x, y: (_longer(x, y) < 1) & (np.minimum(abs(x), abs(y)) < 0.28),
    "star": lambda x, y: _radius(x, y) < 0.65 + 0.35 * np.cos(5 * np.arctan2(y, x)),
    "stripes": lambda x, y: (_longer(x, y) < 0.9) & (np.sin(9 * x) > 0),
    "checks": lambda x, y: (_longer(x, y) < 0.9) & (np.sin(5 * x) * np.sin(5 * y) > 0),
}
"""Whether a point is in the shape of a class, of about radius 1 about the origin."""


def picture(name: str, source: np.random.Generator) -> npt.NDArray[np.uint8]:
    """A picture of a class, (SIDE, SIDE, 3)."""
    rows, columns = np.mgrid[0:SIDE, 0:SIDE].astype(float)
    radius, angle = source.uniform(16, 28), source.uniform(0, 2 * np.pi)
    across, down = source.uniform(radius, SIDE - radius, 2)
    x = ((columns - across) * np.cos(angle) + (rows - down) * np.sin(angle)) / radius
    y = ((rows - down) * np.cos(angle) - (columns - across) * np.sin(angle)) / radius
    corners = source.uniform(0.2, 0.8, (4, 3))
    right, low = (columns / SIDE)[..., None], (rows / SIDE)[..., None]
    pixels = (1 - low) * ((1 - right) * corners[0] + right * corners[1])
    pixels += low * ((1 - right) * corners[2] + right * corners[3])
    for _ in range(2):
        slope, at = source.uniform(0, np.pi), source.uniform(-0.3, 0.3) * SIDE
        away = (columns - SIDE / 2) * np.cos(slope) + (rows - SIDE / 2) * np.sin(slope) - at
        pixels[abs(away) < 1] = source.uniform(0, 1, 3)
    colour = np.where(corners.mean(0) < 0.5, source.uniform(0.7, 1, 3), source.uniform(0, 0.3, 3))  # stands out
    strength = source.uniform(0.7, 1) * SHAPES[name](x, y)[..., None]
    pixels = (1 - strength) * pixels + strength * colour + source.normal(0, NOISE, pixels.shape)
    return np.asarray(np.clip(255 * pixels, 0, 255), np.uint8)


def write(folder: Path, images: int, seed: int = 0) -> None:
    """Write JPEGs, equally many of each class, each class in a folder of its name."""
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        list(pool.map(partial(_write_class, folder, images // len(SHAPES), seed), range(len(SHAPES))))


def _write_class(folder: Path, count: int, seed: int, number: int) -> None:
    name = list(SHAPES)[number]
    source = np.random.default_rng([seed, number])
    (folder / name).mkdir(parents=True)
    for index in range(count):
        Image.fromarray(picture(name, source)).save(folder / name / f"{index:05}.jpg", quality=90)
