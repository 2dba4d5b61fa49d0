"""Codecs: float32 vectors to bytes and back. Pure: no I/O, no state, no pickle.

The job names the codec and the blob does not, so that a sender cannot choose which decoder a receiver runs.
"""

from typing import Protocol

from computeshare.codecs.float32 import Float32
from computeshare.codecs.half_precision import Halves
from computeshare.codecs.int8 import Int8
from computeshare.codecs.topk import TopK
from computeshare.jobspec.spec import CodecName
from computeshare.types import Blob, Vector


class Codec(Protocol):
    """A contiguous float32 vector of shape (d,) to bytes, and back."""

    @property
    def exact(self) -> bool:
        """Whether decoding returns the encoded values bit for bit."""
        ...

    @property
    def residual(self) -> bool:
        """Whether a sender must use error feedback (`Feedback`)."""
        ...

    def encode(self, values: Vector, seed: int = 0, compress: bool = True) -> bytes:
        """Encode the values (d,) as one blob.

        Args:
            seed: from 0 on; the only source of randomness, for codecs that round at random. Consecutive seeds give
                independent roundings, so that bucket b of a vector takes the vector's seed + b.
            compress: spend time on a shorter blob; the decoded values are the same.
        """
        ...

    def decode(self, blob: Blob, size: int, out: Vector | None = None) -> Vector:
        """Decode `size` values from `blob`, into `out` (contiguous) if given.

        Raises: CodecError: the blob is malformed; `out` may have been changed.
        """
        ...


CODECS: dict[CodecName, Codec] = {
    "float32": Float32(),
    "float16": Halves("float16"),
    "bfloat16": Halves("bfloat16"),
    "int8": Int8(),
    "topk": TopK(),
}
DELTAS: frozenset[CodecName] = frozenset({"int8", "topk"})
"""Codecs too lossy for whole weights: downwards they encode the difference from the previous version."""
