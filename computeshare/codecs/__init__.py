"""Vectors as bytes and back. Pure: no I/O, no state, no pickle.

The codec's name stands in the job, never in the blob, so a sender cannot choose what a receiver runs.
"""

from typing import Protocol

from computeshare.codecs.float16 import Float16
from computeshare.codecs.float32 import Float32
from computeshare.spec import CodecName
from computeshare.types import Vector


class Codec(Protocol):
    """A float32 vector of shape (d,) as bytes, and back."""

    @property
    def exact(self) -> bool:
        """Whether decoding gives the same bits that were encoded."""
        ...

    def encode(self, vector: Vector) -> bytes:
        """The vector as one framed blob."""
        ...

    def decode(self, blob: bytes | memoryview, size: int) -> Vector:
        """The vector of shape (size,) in `blob`. Raises CodecError for anything else."""
        ...


CODECS: dict[CodecName, Codec] = {"float32": Float32(), "float16": Float16()}
