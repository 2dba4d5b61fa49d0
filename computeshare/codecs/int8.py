"""Eight bits per value, with one scale per block."""

from collections.abc import Sequence
from functools import cache
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt

from computeshare.codecs import frame
from computeshare.errors import CodecError
from computeshare.tensors.layout import Piece
from computeshare.types import Blob, Vector

BLOCK = 512
"""Values that share a scale."""
_CHUNK = 1 << 16
"""Values processed at a time, so that intermediate results stay in the cache."""
_STEPS = np.float32(126.999)
"""A little below 127, so that no rounding of the reciprocal can exceed 127."""
_SMALLEST = np.float32(1e-37)
"""A block whose largest magnitude is smaller becomes zeros: its scale would have no finite reciprocal."""

Levels = npt.NDArray[np.int8]


class Int8:
    """Blocks of 512 values as integers from -127 to 127, times the block's scale.

    Rounding is stochastic, hence unbiased over many seeds (Gupta et al., arXiv:1502.02551), and depends on `seed`
    alone, hence gives the same bits on every machine. A block with a non-finite value decodes to non-finite values.
    """

    name: ClassVar[str] = "int8"
    exact: ClassVar[bool] = False
    residual: ClassVar[bool] = False
    differences: ClassVar[bool] = True
    bytes_per_value: ClassVar[int] = 2
    auto_down: ClassVar[Sequence[str]] = ("int8",)

    def fitted(self, pieces: Sequence[Piece]) -> Self:
        return self

    def encode(self, values: Vector, seed: int = 0, compress: bool = True) -> bytes:
        raw = bytearray(4 * -(-values.size // BLOCK) + values.size)
        quantise(values, seed, *_parts(raw, values.size), BLOCK, _STEPS)
        return frame.pack(raw, compress)

    def decode(self, blob: Blob, size: int, out: Vector | None = None) -> Vector:
        scales, levels = _parts(frame.unpack(blob, 4 * -(-size // BLOCK) + size), size)
        if size and levels.min() == -128:
            raise CodecError("a level of -128 is none of this codec's")
        return multiplied(levels, scales, BLOCK, out)


def quantise(values: Vector, seed: int, scales: Vector, levels: Levels, block: int, steps: np.float32) -> None:
    """Fill `levels` with `values` as integers up to `steps`, rounded at random, times the scale of their block.

    Args:
        block: values in a block, a divisor of 65,536; a short last block is treated as padded with zeros.
        steps: a little below a whole number, so that no rounding of a reciprocal can exceed that.
    """
    scratch = np.empty(min(_CHUNK, scales.size * block), np.float32)
    starts = range(0, values.size, _CHUNK)
    for start, offset in zip(starts, _offsets(seed, len(starts)), strict=True):
        part = slice(start, min(start + _CHUNK, values.size))
        some = scales[start // block : -(-part.stop // block)]
        scaled = scratch[: some.size * block]
        scaled[: part.stop - start], scaled[part.stop - start :] = values[part], 0
        rows = scaled.reshape(-1, block)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            np.divide(np.maximum(rows.max(1), -rows.min(1)), steps, out=some)
            some[some < _SMALLEST / steps] = 0
            rows *= np.where(some == 0, 0, 1 / some)[:, None]
            scaled += _table()[offset : offset + scaled.size]
            np.floor(scaled, out=scaled)
            np.copyto(levels[part], scaled[: part.stop - start], casting="unsafe")


def multiplied(levels: Levels, scales: Vector, block: int, out: Vector | None = None) -> Vector:
    """The values of levels (d,) with a scale for each block, in `out` if given."""
    size = levels.size
    out = np.empty(size, np.float32) if out is None else out
    whole = size // block * block
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, whole, _CHUNK):
            stop = min(start + _CHUNK, whole)
            part = out[start:stop].reshape(-1, block)
            np.copyto(part, levels[start:stop].reshape(-1, block))
            part *= scales[start // block : stop // block, None]
        if whole < size:
            np.multiply(levels[whole:], scales[-1], out=out[whole:])
    return out


def _parts(raw: bytearray | memoryview, size: int) -> tuple[Vector, Levels]:
    blocks = -(-size // BLOCK)
    return np.frombuffer(raw, "<f4", blocks), np.frombuffer(raw, np.int8, size, 4 * blocks)


def _offsets(seed: int, chunks: int) -> list[int]:
    """The start of each chunk's noise in the table."""
    drawn: list[int] = (np.random.SeedSequence(seed).generate_state(chunks) % _CHUNK).tolist()
    return drawn


@cache
def _table() -> Vector:
    """The noise added before rounding down: all 65,536 even steps of [0, 1) in a random order, twice.

    Over all offsets each value meets each step once, so that the rounding has no bias at all.
    """
    order = np.argsort(np.random.Philox(key=512).random_raw(_CHUNK), kind="stable")
    once = ((order + 0.5) / _CHUNK).astype(np.float32)
    return np.concatenate((once, once))
