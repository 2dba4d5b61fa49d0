"""Full precision: four bytes per value."""

from typing import ClassVar

import numpy as np

from computeshare.codecs import frame
from computeshare.types import Blob, Vector


class Float32:
    """Little-endian IEEE 754 single precision; exact."""

    exact: ClassVar[bool] = True
    residual: ClassVar[bool] = False

    def encode(self, values: Vector, seed: int = 0, compress: bool = True) -> bytes:
        return frame.pack(np.ascontiguousarray(values, "<f4"), compress)

    def decode(self, blob: Blob, size: int, out: Vector | None = None) -> Vector:
        values = np.frombuffer(frame.unpack(blob, 4 * size), "<f4")
        if out is None:
            return values
        np.copyto(out, values)
        return out
