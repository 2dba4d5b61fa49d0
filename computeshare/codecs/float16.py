"""Half precision: two bytes a value."""

from typing import ClassVar

import numpy as np

from computeshare.codecs import frame
from computeshare.types import Vector


class Float16:
    """Little-endian IEEE 754 half precision: 11 significant bits, magnitudes from 6e-8 to 65,504.

    A larger finite value becomes infinite, which a receiver refuses: gradients of that size mean divergence.
    """

    exact: ClassVar[bool] = False

    def encode(self, vector: Vector) -> bytes:
        with np.errstate(over="ignore"):
            return frame.pack(vector.astype("<f2").data)

    def decode(self, blob: bytes | memoryview, size: int) -> Vector:
        return np.frombuffer(frame.unpack(blob, 2 * size), "<f2").astype(np.float32)
