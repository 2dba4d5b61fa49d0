"""Four bits per value, with one scale per block."""

from collections.abc import Sequence
from typing import ClassVar, Self

import numpy as np

from computeshare.codecs import frame
from computeshare.codecs.int8 import Levels, multiplied, quantise
from computeshare.errors import CodecError
from computeshare.tensors.layout import Piece
from computeshare.types import Blob, Vector

BLOCK = 128
"""Values that share a scale."""
_STEPS = np.float32(6.9999)


class Int4:
    """Blocks of 128 values as integers from -7 to 7, times the block's scale; as `Int8` otherwise.

    Rounding at random has no bias, but much more noise than with eight bits: for the outer updates of `local`, after
    Streaming DiLoCo (Douillard et al., arXiv:2501.18512), which are rare and averaged.
    """

    name: ClassVar[str] = "int4"
    exact: ClassVar[bool] = False
    residual: ClassVar[bool] = False
    differences: ClassVar[bool] = True
    bytes_per_value: ClassVar[int] = 1
    auto_down: ClassVar[Sequence[str]] = ("int4", "lowrank8")

    def fitted(self, pieces: Sequence[Piece]) -> Self:
        return self

    def encode(self, values: Vector, seed: int = 0, compress: bool = True) -> bytes:
        scales, levels = np.empty(-(-values.size // BLOCK), "<f4"), np.zeros(values.size + values.size % 2, np.int8)
        quantise(values, seed, scales, levels[: values.size], BLOCK, _STEPS)
        pairs = (levels[::2] & 15).view(np.uint8) | (levels[1::2] << 4).view(np.uint8)
        return frame.pack_all((scales, pairs), compress)

    def decode(self, blob: Blob, size: int, out: Vector | None = None) -> Vector:
        scales, raw = frame.unpack_all(blob, (4 * -(-size // BLOCK), -(-size // 2)))
        pairs = np.frombuffer(raw, np.int8)
        levels: Levels = np.empty(2 * pairs.size, np.int8)
        levels[::2], levels[1::2] = (pairs << 4) >> 4, pairs >> 4
        if size and levels.min() == -8:
            raise CodecError("a level of -8 is none of this codec's")
        return multiplied(levels[:size], np.frombuffer(scales, "<f4"), BLOCK, out)
