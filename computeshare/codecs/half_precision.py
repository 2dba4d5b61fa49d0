"""Two bytes per value: half precision and bfloat16."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt

from computeshare.codecs import frame
from computeshare.tensors.layout import Piece
from computeshare.types import Blob, Vector

Words = npt.NDArray[np.uint16]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Halves:
    """`float16` is IEEE 754 half precision: 11 significant bits, magnitudes from 6e-8 to 65,504; larger finite values
    become infinite, and a receiver refuses them. `bfloat16` is the upper half of single precision: 8 significant bits.

    Both round to nearest, ties to even. Compressed, upper and lower bytes travel in separate frames: exponents repeat
    and significant bits do not, so that a dense gradient shrinks by 15 % (or 30 %) more. The casts are torch's: NumPy
    has no bfloat16, and takes ten times as long for subnormal float16 values, which small gradients become.
    """

    name: Literal["float16", "bfloat16"]
    auto_down: Sequence[str] = ()
    exact: ClassVar[bool] = False
    residual: ClassVar[bool] = False
    differences: ClassVar[bool] = False
    bytes_per_value: ClassVar[int] = 2

    def fitted(self, pieces: Sequence[Piece]) -> Self:
        return self

    def encode(self, values: Vector, seed: int = 0, compress: bool = True) -> bytes:
        import torch

        writable = values if values.flags.writeable else values.copy()  # torch warns of anything else
        short = torch.from_numpy(np.ascontiguousarray(writable)).to(getattr(torch, self.name))
        words = short.view(torch.int16).numpy().view(np.uint16)
        return frame.pack_all(_planes(words)) if compress else frame.pack(words.astype("<u2", copy=False), compress)

    def decode(self, blob: Blob, size: int, out: Vector | None = None) -> Vector:
        import torch

        if frame.is_single(blob):
            body = np.frombuffer(frame.unpack(blob, 2 * size), "<u2")
            words = np.require(body, np.uint16, ["ALIGNED", "WRITEABLE"])  # torch requires both; mostly no copy is made
        else:
            words = _words(*(np.frombuffer(plane, np.uint8) for plane in frame.unpack_all(blob, (size, size))))
        short = torch.from_numpy(words.view(np.int16)).view(getattr(torch, self.name))
        out = np.empty(size, np.float32) if out is None else out
        torch.from_numpy(out).copy_(short)
        return out


def _planes(words: Words) -> tuple[Bytes, Bytes]:
    """The upper and the lower bytes of `words`; shifts and casts are three times faster than strides."""
    return (words >> 8).astype(np.uint8), words.astype(np.uint8)


def _words(upper: Bytes, lower: Bytes) -> Words:
    words = upper.astype(np.uint16)
    words <<= 8
    words |= lower
    return words
