"""Vectors as bytes and back. Pure: no I/O, no state, no pickle.

The codec's name stands in the job, never in the blob, so a sender cannot choose what a receiver runs.
"""

from typing import Protocol

from computeshare.codecs.bfloat16 import BFloat16
from computeshare.codecs.float16 import Float16
from computeshare.codecs.float32 import Float32
from computeshare.codecs.int8 import Int8
from computeshare.spec import CodecName
from computeshare.types import Blob, Vector


class Codec(Protocol):
    """A float32 vector of shape (d,) as bytes, and back."""

    @property
    def exact(self) -> bool:
        """Whether decoding gives the same bits that were encoded."""
        ...

    def encode(self, vector: Vector, seed: int = 0) -> bytes:
        """The vector as one framed blob; where a codec rounds at random, `seed` alone decides how."""
        ...

    def decode(self, blob: Blob, size: int, out: Vector | None = None) -> Vector:
        """The vector of shape (size,) in `blob`, written into `out` where one is given. Raises CodecError for anything
        else; `out` may be changed then.
        """
        ...


CODECS: dict[CodecName, Codec] = {"float32": Float32(), "float16": Float16(), "bfloat16": BFloat16(), "int8": Int8()}
