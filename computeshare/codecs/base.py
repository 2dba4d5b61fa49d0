"""The contract of a codec: all that the rest of the code asks of one.

Pure: no I/O, no state, no pickle. The job names the codec and the blob does not, so that a sender cannot choose which
decoder a receiver runs.
"""

from collections.abc import Sequence
from typing import Protocol

from computeshare.tensors.layout import Piece
from computeshare.types import Blob, Vector


class Codec(Protocol):
    """A contiguous float32 vector of shape (d,) to bytes, and back. Codecs are listed in `registry`."""

    @property
    def name(self) -> str:
        """The codec's name in a JobSpec."""
        ...

    @property
    def exact(self) -> bool:
        """Whether decoding returns the encoded values bit for bit."""
        ...

    @property
    def residual(self) -> bool:
        """Whether a sender must use error feedback (`Feedback`)."""
        ...

    @property
    def differences(self) -> bool:
        """Whether the codec is too lossy for whole weights: as the codec down, it encodes each version's difference
        from the previous version.
        """
        ...

    @property
    def bytes_per_value(self) -> int:
        """The most bytes of an encoded value, rounded up: the estimate of the broker's memory uses it."""
        ...

    @property
    def auto_down(self) -> Sequence[str]:
        """The codecs down that `codec: auto` tries with this codec up, the least lossy first; empty: `auto` never
        chooses this codec up.
        """
        ...

    def fitted(self, pieces: Sequence[Piece]) -> "Codec":
        """This codec for vectors made of these pieces of tensors, in order; itself if their shapes do not matter.

        Sender and receiver must use the same pieces.
        """
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
