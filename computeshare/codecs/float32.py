"""Full precision: four bytes per value."""

from collections.abc import Sequence
from typing import ClassVar, Self

import numpy as np

from computeshare.codecs import frame
from computeshare.tensors.layout import Piece
from computeshare.types import Blob, Vector


class Float32:
    """Little-endian IEEE 754 single precision; exact."""

    name: ClassVar[str] = "float32"
    exact: ClassVar[bool] = True
    residual: ClassVar[bool] = False
    differences: ClassVar[bool] = False
    bytes_per_value: ClassVar[int] = 4
    auto_down: ClassVar[Sequence[str]] = ()

    def fitted(self, pieces: Sequence[Piece]) -> Self:
        return self

    def encode(self, values: Vector, seed: int = 0, compress: bool = True) -> bytes:
        return frame.pack(np.ascontiguousarray(values, "<f4"), compress)

    def decode(self, blob: Blob, size: int, out: Vector | None = None) -> Vector:
        values = np.frombuffer(frame.unpack(blob, 4 * size), "<f4")
        if out is None:
            return values
        np.copyto(out, values)
        return out
