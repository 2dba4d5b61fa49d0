"""Matrices as products of two thin matrices, of eight bits per value."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
import numpy.typing as npt

from computeshare.codecs import frame
from computeshare.codecs.half_precision import Halves
from computeshare.errors import CodecError
from computeshare.tensors.layout import Piece
from computeshare.types import Blob, Vector

if TYPE_CHECKING:
    import torch

LEVELS = 127
"""Both factors are integers from -127 to 127."""
MOST_SHIFT = 7
"""Most halvings of a row of the right factor. With eight rows, every sum of products then has 24 bits."""
MOST_EXPONENT = 100
"""Of a scale whose products with levels are far from the limits of float32."""
_OTHERS = Halves("float16")
"""The codec of vectors, and of matrices too small to gain from factors."""
_SMALLEST = np.float32(1e-37)
"""A matrix of smaller factors becomes zeros: its scale would have no finite reciprocal."""

Levels = npt.NDArray[np.int8]
Shifts = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A piece of a tensor as a matrix of whole rows, of which the first and the last may be incomplete."""

    where: slice
    """Its values in the bucket."""
    rows: int
    columns: int
    before: int
    """The number of values missing in its first row."""

    def of(self, values: Vector) -> "torch.Tensor":
        """The matrix (rows, columns), zero where values are missing, in aligned memory, since sums depend on that."""
        import torch

        matrix, some = torch.empty(self.rows * self.columns), values[self.where]
        flat, end = matrix.numpy(), self.before + some.size
        flat[: self.before], flat[self.before : end], flat[end:] = 0, some, 0
        return matrix.view(self.rows, self.columns)

    def blocks(self, values: Vector) -> Iterator[tuple[slice, slice, Vector]]:
        """Views of the matrix's values as blocks: their rows, their columns, and the values in that shape."""
        flat, head = values[self.where], -self.before % self.columns
        if head:
            yield slice(0, 1), slice(self.before, None), flat[:head].reshape(1, -1)
        first, (whole, tail) = bool(head), divmod(flat.size - head, self.columns)
        body = head + whole * self.columns
        yield slice(first, first + whole), slice(None), flat[head:body].reshape(whole, self.columns)
        if tail:
            yield slice(self.rows - 1, self.rows), slice(0, tail), flat[body:].reshape(1, -1)


@dataclass(frozen=True, slots=True)
class LowRank:
    """Approximates each matrix by a product of two factors with `rank` columns (1 to 8); needs error feedback.

    After PowerSGD (Vogels et al., arXiv:1905.13727), with two subspace iterations from a random start that `seed`
    determines, not one from the factors before: the same values give the same bits, whatever was sent before. A tensor
    is taken as a matrix (out, rest). Vectors, and matrices that factors would not halve, travel as float16.

    The factors are integers times powers of two, so small that float32 holds every sum of their products: any processor
    decodes the same bits, in whatever order it adds. In a matrix with a non-finite value, all values decode to NaN.
    """

    rank: int
    auto_down: Sequence[str] = ()
    pieces: tuple[Piece, ...] = ()
    """The pieces of a vector, in order; values after the last piece travel as float16."""
    exact: ClassVar[bool] = False
    residual: ClassVar[bool] = True
    differences: ClassVar[bool] = True
    bytes_per_value: ClassVar[int] = 2

    @property
    def name(self) -> str:
        return f"lowrank{self.rank}"

    def fitted(self, pieces: Sequence[Piece]) -> Self:
        return replace(self, pieces=tuple(pieces))

    def encode(self, values: Vector, seed: int = 0, compress: bool = True) -> bytes:
        matrices, others = self._split(values.size)
        raw = bytearray(self._factor_bytes(matrices))
        scales, shifts, levels = self._parts(raw, len(matrices))
        starts, at = _signs(seed, self.rank * sum(one.columns for one in matrices)), 0
        for index, one in enumerate(matrices):
            start, starts = np.split(starts, [self.rank * one.columns])
            factors = _factors(one.of(values), start.reshape(self.rank, one.columns))
            scales[index], shifts[index], some = _quantised(*factors)
            levels[at : at + some.size] = some
            at += some.size
        rest = np.concatenate([values[where] for where in others])
        return frame.join((frame.pack(raw, compress), _OTHERS.encode(rest, seed, compress)))

    def decode(self, blob: Blob, size: int, out: Vector | None = None) -> Vector:
        import torch

        torch.get_num_threads()  # until a thread has asked, its products use all processors, not as many as were set
        matrices, others = self._split(size)
        body, rest = frame.split(blob, 2)
        scales, shifts, levels = self._parts(frame.unpack(body, self._factor_bytes(matrices)), len(matrices))
        if shifts.max(initial=0) > MOST_SHIFT or levels.min(initial=0) < -LEVELS:
            raise CodecError(f"a shift beyond {MOST_SHIFT} or a level of -128 is none of this codec's")
        if not matrices:
            return _OTHERS.decode(rest, size, out)
        out, at = np.empty(size, np.float32) if out is None else out, 0
        for one, scale, shift in zip(matrices, scales, shifts, strict=True):
            ends = at, at + self.rank * one.rows, at + self.rank * (one.rows + one.columns)
            left, right = (levels[a:b].astype(np.float32).reshape(self.rank, -1) for a, b in pairwise(ends))
            exponent, factor = _split_scale(scale)
            right = np.ldexp(right, exponent - shift.astype(int)[:, None])
            for rows, columns, block in one.blocks(out):
                factors = torch.from_numpy(left[:, rows]).T, torch.from_numpy(right[:, columns])
                torch.mm(*factors, out=torch.from_numpy(block))
            if factor != 1:
                with np.errstate(invalid="ignore", over="ignore"):
                    out[one.where] *= factor
            at = ends[-1]
        plain = _OTHERS.decode(rest, sum(where.stop - where.start for where in others))
        for where in others:
            there, plain = np.split(plain, [where.stop - where.start])
            out[where] = there
        return out

    def _split(self, size: int) -> tuple[list[_Matrix], list[slice]]:
        """The matrices to factor in a vector of `size` values, and where its other values are."""
        matrices, others, at = [], [], 0
        for piece in self.pieces:
            first, before = divmod(piece.start, piece.columns)
            rows, count = -(-piece.stop // piece.columns) - first, piece.stop - piece.start
            where = slice(at, at + count)
            if self.rank * (rows + piece.columns) < count:
                matrices.append(_Matrix(where, rows, piece.columns, before))
            else:
                others.append(where)
            at = where.stop
        return matrices, [*others, slice(at, size)]

    def _factor_bytes(self, matrices: Sequence[_Matrix]) -> int:
        return sum(4 + self.rank * (1 + one.rows + one.columns) for one in matrices)

    def _parts(self, raw: bytearray | memoryview, count: int) -> tuple[Vector, Shifts, Levels]:
        """Views of the factors' bytes: scales (count,), shifts (count, rank), and levels, left before right."""
        scales, shifts = 4 * count, self.rank * count
        return (
            np.frombuffer(raw, "<f4", count),
            np.frombuffer(raw, np.uint8, shifts, scales).reshape(count, self.rank),
            np.frombuffer(raw, np.int8, -1, scales + shifts),
        )


def _split_scale(scale: np.float32) -> tuple[int, np.float32]:
    """An exponent for the right factor, and what its products are multiplied by: 1 for a scale that is a power of two,
    which saves a pass over the matrix and gives the same bits.
    """
    mantissa, exponent = np.frexp(scale)
    if mantissa == 0.5 and abs(exponent) <= MOST_EXPONENT:
        return int(exponent) - 1, np.float32(1)
    return 0, scale


def _signs(seed: int, count: int) -> Vector:
    """Random signs (count,), the same on every machine."""
    drawn = np.random.Philox(key=seed).random_raw(-(-count // 64)).astype("<u8")
    return 2 * np.unpackbits(drawn.view(np.uint8), count=count).astype(np.float32) - 1


def _factors(matrix: "torch.Tensor", start: Vector) -> tuple[Vector, Vector]:
    """Factors (rank, rows) and (rank, columns); the transposed left, which is orthonormal, times the right approximates
    `matrix`. NaN if the matrix is not finite, or so large that its sums are not.

    Few long rows times a matrix are up to ten times as fast as the matrix times few columns.

    Args:
        start: any vectors (rank, columns).
    """
    import torch

    sketch = torch.tensor(start) @ matrix.T  # a copy in aligned memory
    if not torch.isfinite(sketch).all():
        return np.full(sketch.shape, np.nan, np.float32), np.full(start.shape, np.nan, np.float32)
    right = _orthonormal(_orthonormal(sketch) @ matrix)
    left = _orthonormal(right @ matrix.T)
    return left.numpy(), (left @ matrix).numpy()


def _orthonormal(rows: "torch.Tensor") -> "torch.Tensor":
    import torch

    columns: torch.Tensor = torch.linalg.qr(rows.T).Q
    return columns.T.contiguous()


def _quantised(left: Vector, right: Vector) -> tuple[np.float32, Shifts, Levels]:
    """A scale for both factors, a power of two; a shift for each row of the right factor; the levels, the left's first.

    A row that is smaller than the largest is doubled up to `MOST_SHIFT` times before it is rounded.
    """
    largest = np.abs(left).max(1)
    right = right * (largest / np.float32(LEVELS))[:, None]
    tops = np.abs(right).max(1)
    scale = tops.max() / np.float32(LEVELS)
    if not _SMALLEST < scale < np.inf:
        nothing = np.float32(0 if scale <= _SMALLEST else np.nan)
        return nothing, np.zeros(len(left), np.uint8), np.zeros(left.size + right.size, np.int8)
    mantissa, exponent = np.frexp(scale)
    scale = np.ldexp(np.float32(1), exponent - (mantissa == 0.5))
    with np.errstate(divide="ignore"):
        shifts = (np.frexp(scale * np.float32(LEVELS) / tops)[1] - 1).clip(0, MOST_SHIFT).astype(np.uint8)
    levels = left * (np.float32(LEVELS) / largest)[:, None], np.ldexp(right / scale, shifts.astype(int)[:, None])
    return scale, shifts, np.concatenate([np.rint(one).clip(-LEVELS, LEVELS).astype(np.int8).ravel() for one in levels])
