"""The largest values of each chunk, at four bits each, and their positions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt

from computeshare.codecs import frame
from computeshare.errors import CodecError
from computeshare.tensors.layout import Piece
from computeshare.types import Blob, Vector

CHUNK = 4096
"""Values in a chunk; a vector's last chunk may be shorter."""
LEVELS = 7
"""Kept values are integers from -7 to 7 times their chunk's scale."""
_SMALLEST = np.float32(1e-37)
"""A chunk whose largest magnitude is smaller becomes zeros: its scale would have no finite reciprocal."""

Columns = npt.NDArray[np.int64]
Levels = npt.NDArray[np.int8]


@dataclass(frozen=True, slots=True)
class TopK:
    """Keeps the `kept` largest magnitudes of every 4,096 values, of equal magnitudes the first, and drops the others.

    Needs error feedback (`Feedback`), since most of a vector is dropped. After Sarfi et al., arXiv:2508.15706. Scales,
    levels and the gaps between kept values (lower bytes, then upper bytes) travel in separate frames, since their bytes
    differ in frequency. Compared with eight bits per value, four save a quarter of the bytes and add a five-hundredth
    to the error. In a chunk with a non-finite value, the kept values decode to non-finite values.
    """

    kept: int = 64
    name: ClassVar[str] = "topk"
    exact: ClassVar[bool] = False
    residual: ClassVar[bool] = True
    differences: ClassVar[bool] = True
    bytes_per_value: ClassVar[int] = 1
    auto_down: ClassVar[Sequence[str]] = ("topk",)

    def fitted(self, pieces: Sequence[Piece]) -> Self:
        return self

    def encode(self, values: Vector, seed: int = 0, compress: bool = True) -> bytes:
        scales, levels, low, high = (bytearray() for _ in range(4))
        for rows, kept in self._sections(np.ascontiguousarray(values)):
            columns = _largest(rows, kept)
            gaps = np.diff(columns, axis=1, prepend=-1) - 1
            section_scales, section_levels = _quantised(np.take_along_axis(rows, columns, 1))
            scales += section_scales.astype("<f4", copy=False).data
            levels += section_levels.data
            low += gaps.astype(np.uint8).data
            high += (gaps >> 8).astype(np.uint8).data
        return frame.pack_all((scales, levels, low, high), compress)

    def decode(self, blob: Blob, size: int, out: Vector | None = None) -> Vector:
        out = np.empty(size, np.float32) if out is None else out
        sections = self._sections(out)
        chunks, picks = sum(len(rows) for rows, _ in sections), sum(len(rows) * kept for rows, kept in sections)
        parts = frame.unpack_all(blob, (4 * chunks, picks, picks, picks))
        scales, levels = np.frombuffer(parts[0], "<f4"), np.frombuffer(parts[1], np.int8)
        low, high = (np.frombuffer(part, np.uint8).astype(np.int64) for part in parts[2:])
        if picks and (levels.min() < -LEVELS or levels.max() > LEVELS):
            raise CodecError(f"a level beyond {LEVELS} is none of this codec's")
        out.fill(0)
        chunk = pick = 0
        for rows, kept in sections:
            these, here = slice(chunk, chunk + len(rows)), slice(pick, pick + len(rows) * kept)
            columns = _columns((low[here] + 256 * high[here]).reshape(-1, kept), rows.shape[1])
            with np.errstate(invalid="ignore", over="ignore"):
                values = levels[here].reshape(-1, kept) * scales[these, None]
            np.put_along_axis(rows, columns, values, 1)
            chunk, pick = these.stop, here.stop
        return out

    def _sections(self, values: Vector) -> list[tuple[Vector, int]]:
        """Views of `values` as rows of one chunk, and the number of values kept in each row.

        First come the whole chunks, then a shorter last chunk, of which the same share is kept, rounded up.
        """
        whole = values.size // CHUNK * CHUNK
        sections = values[:whole].reshape(-1, CHUNK), values[whole:].reshape(1, -1)
        return [(rows, -(-rows.shape[1] * self.kept // CHUNK)) for rows in sections if rows.size]


def _largest(rows: Vector, kept: int) -> Columns:
    """The columns of each row's `kept` largest magnitudes, ascending; of equal magnitudes the first; NaN is the
    largest.

    Magnitudes are compared as bit patterns, whose order is the same. torch finds the smallest kept magnitude (NumPy's
    partition takes ten times as long for the many zeros of a gradient), but does not specify which of several equal
    values it takes.
    """
    import torch

    magnitudes = rows.view(np.int32) & 0x7FFFFFFF
    least = torch.from_numpy(magnitudes).topk(kept, dim=1, sorted=False).values.amin(1, keepdim=True).numpy()
    chosen = magnitudes >= least
    tied = np.count_nonzero(chosen, axis=1) > kept
    if tied.any():
        above, equal = magnitudes[tied] > least[tied], magnitudes[tied] == least[tied]
        room = kept - np.count_nonzero(above, axis=1, keepdims=True)
        chosen[tied] = above | (equal & (np.cumsum(equal, axis=1, dtype=np.int32) <= room))
    columns: Columns = np.flatnonzero(chosen).reshape(-1, kept) % rows.shape[1]
    return columns


def _quantised(values: Vector) -> tuple[Vector, Levels]:
    """A scale for each row, and the row's values as integer multiples of it, rounded to nearest."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        scales = np.abs(values).max(1) / np.float32(LEVELS)
        scales[scales < _SMALLEST / LEVELS] = 0
        levels = np.rint(values * np.where(scales == 0, 0, 1 / scales)[:, None])
    return scales, np.nan_to_num(levels).astype(np.int8)


def _columns(gaps: Columns, width: int) -> Columns:
    """The column of each kept value, from the gaps before it. Raises CodecError: a column beyond the row."""
    columns = np.cumsum(gaps + 1, axis=1) - 1
    if columns[:, -1].max() >= width:
        raise CodecError(f"a position beyond the {width} values of its chunk")
    return columns
