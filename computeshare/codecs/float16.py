"""Half precision: two bytes a value."""

import sys
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from computeshare.codecs import frame
from computeshare.types import Blob, Vector

Half = npt.NDArray[np.float16]


class Float16:
    """Little-endian IEEE 754 half precision: 11 significant bits, magnitudes from 6e-8 to 65,504.

    A larger finite value becomes infinite, which a receiver refuses: gradients of that size mean divergence.
    The casts are torch's, with the same bits as NumPy's: that one takes ten times as long, and longer still for the
    subnormal halves that small gradients become.
    """

    exact: ClassVar[bool] = False

    def encode(self, vector: Vector, seed: int = 0) -> bytes:
        import torch

        writable = vector if vector.flags.writeable else vector.copy()  # torch warns of anything else
        half = torch.from_numpy(np.ascontiguousarray(writable)).to(torch.float16).numpy()
        return frame.pack(_little(half).data)

    def decode(self, blob: Blob, size: int, out: Vector | None = None) -> Vector:
        import torch

        half = _little(np.frombuffer(bytearray(frame.unpack(blob, 2 * size)), np.float16))
        out = np.empty(size, np.float32) if out is None else out
        torch.from_numpy(out).copy_(torch.from_numpy(half))
        return out


def _little(half: Half) -> Half:
    return half if sys.byteorder == "little" else half.byteswap()
