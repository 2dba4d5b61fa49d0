"""Vectors as bytes and back. Pure: no I/O, no state, no pickle.

The codec's name stands in the job, never in the blob, so a sender cannot choose what a receiver runs.
"""

from typing import Protocol

from computeshare.codecs.float32 import Float32
from computeshare.codecs.half_precision import Halves
from computeshare.codecs.int8 import Int8
from computeshare.codecs.topk import TopK
from computeshare.jobspec.spec import CodecName
from computeshare.types import Blob, Vector


class Codec(Protocol):
    """A contiguous float32 vector of shape (d,) as bytes, and back."""

    @property
    def exact(self) -> bool:
        """Whether decoding gives the same bits that were encoded."""
        ...

    @property
    def residual(self) -> bool:
        """Whether a sender must add what was left out of one vector to the next (`Feedback`)."""
        ...

    def encode(self, values: Vector, seed: int = 0, compress: bool = True) -> bytes:
        """The values as one blob.

        Args:
            seed: from 0 on; where a codec rounds at random, it alone decides how. Neighbours have nothing in common,
                so that bucket b of a vector takes the vector's seed + b.
            compress: spend time on making the blob shorter; what is decoded is the same.
        """
        ...

    def decode(self, blob: Blob, size: int, out: Vector | None = None) -> Vector:
        """The values of shape (size,) in `blob`, written into `out`, contiguous, where one is given.

        Raises: CodecError: the blob is anything else. `out` may be changed then.
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
"""Codecs that lose too much of a version's weights: down, they carry the difference from the version before."""
