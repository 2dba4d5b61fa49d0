"""Bfloat16: two bytes a value, the range of single precision."""

from typing import ClassVar

import numpy as np

from computeshare.codecs import frame
from computeshare.types import Blob, Vector


class BFloat16:
    """The upper half of little-endian IEEE 754 single precision, rounded to the nearest: 8 significant bits."""

    exact: ClassVar[bool] = False

    def encode(self, vector: Vector, seed: int = 0) -> bytes:
        import torch

        writable = vector if vector.flags.writeable else vector.copy()  # torch warns of anything else
        brief = torch.from_numpy(np.ascontiguousarray(writable)).to(torch.bfloat16).view(torch.int16).numpy()
        return frame.pack(np.ascontiguousarray(brief, "<i2").data)

    def decode(self, blob: Blob, size: int, out: Vector | None = None) -> Vector:
        import torch

        brief = np.frombuffer(bytearray(frame.unpack(blob, 2 * size)), "<i2").astype(np.int16, copy=False)
        out = np.empty(size, np.float32) if out is None else out
        torch.from_numpy(out).copy_(torch.from_numpy(brief).view(torch.bfloat16))
        return out
