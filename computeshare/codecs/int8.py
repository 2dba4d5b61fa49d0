"""Eight bits a value, with one scale per block."""

from functools import cache
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from computeshare.codecs import frame
from computeshare.errors import CodecError
from computeshare.types import Blob, Vector

BLOCK = 512
"""Values that share a scale."""
_CHUNK = 128 * BLOCK
"""Values worked on at a time, so that what lies between them stays in the cache."""
_STEPS = np.float32(126.999)
"""A little below 127, so that no rounding of the reciprocal leads beyond it."""
_SMALLEST = np.float32(1e-37)
"""A block without any larger value becomes zeros: its scale would have no reciprocal."""


class Int8:
    """Blocks of 512 values as integers from -127 to 127 times the block's scale.

    The rounding is stochastic, hence without bias over many seeds (Gupta et al., arXiv:1502.02551), and drawn from
    `seed` alone, hence the same bits whoever encodes. Values that are not finite make their block so.
    """

    exact: ClassVar[bool] = False

    def encode(self, vector: Vector, seed: int = 0) -> bytes:
        blocks = -(-vector.size // BLOCK)
        raw = bytearray(4 * blocks + vector.size)
        scales = np.frombuffer(raw, "<f4", blocks)
        levels = np.frombuffer(raw, np.int8, vector.size, 4 * blocks)
        scratch = np.empty(min(_CHUNK, blocks * BLOCK), np.float32)
        for number, start in enumerate(range(0, vector.size, _CHUNK)):
            part = vector[start : start + _CHUNK]
            _quantise(
                part,
                scales[start // BLOCK : start // BLOCK + -(-part.size // BLOCK)],
                levels[start : start + part.size],
                _noise(seed, number),
                scratch,
            )
        return frame.pack(raw)

    def decode(self, blob: Blob, size: int, out: Vector | None = None) -> Vector:
        blocks = -(-size // BLOCK)
        raw = frame.unpack(blob, 4 * blocks + size)
        scales = np.frombuffer(raw, "<f4", blocks)
        levels = np.frombuffer(raw, np.int8, size, 4 * blocks)
        if size and levels.min() == -128:
            raise CodecError("a level of -128 is none of this codec's")
        out = np.empty(size, np.float32) if out is None else out
        whole = size // BLOCK * BLOCK
        with np.errstate(invalid="ignore", over="ignore"):
            for start in range(0, whole, _CHUNK):
                stop = min(start + _CHUNK, whole)
                part = out[start:stop].reshape(-1, BLOCK)
                np.copyto(part, levels[start:stop].reshape(-1, BLOCK))
                part *= scales[start // BLOCK : stop // BLOCK, None]
            out[whole:] = levels[whole:]
            out[whole:] *= scales[-1] if whole < size else 1
        return out


def _quantise(values: Vector, scales: Vector, levels: npt.NDArray[np.int8], noise: Vector, scratch: Vector) -> None:
    """Fill `scales` and `levels` from `values`; a short last block is worked on as if zeros followed it."""
    scaled = scratch[: scales.size * BLOCK]
    scaled[: values.size], scaled[values.size :] = values, 0
    rows = scaled.reshape(-1, BLOCK)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        np.divide(np.maximum(rows.max(1), -rows.min(1)), _STEPS, out=scales)
        scales[scales < _SMALLEST / _STEPS] = 0
        rows *= np.where(scales == 0, 0, 1 / scales)[:, None]
        scaled += noise[: scaled.size]
        np.floor(scaled, out=scaled)
        np.copyto(levels, scaled[: values.size], casting="unsafe")


def _noise(seed: int, chunk: int) -> Vector:
    """What a chunk's values are rounded up by, uniform in [0, 1): a stretch of a fixed table, from where the seed says."""
    start = int(np.random.SeedSequence([seed, chunk]).generate_state(1)[0]) % _CHUNK
    return _table()[start : start + _CHUNK]


@cache
def _table() -> Vector:
    once = (np.random.Philox(key=512).random_raw(_CHUNK) >> 40).astype(np.float32) / np.float32(2**24)
    return np.concatenate((once, once))
