"""Error feedback: what a codec left out of one vector is added to the next."""

from collections.abc import Sequence

import numpy as np

from computeshare.codecs import Codec
from computeshare.types import Vector


class Feedback:
    """A sender's memory of what it still owes, for a vector that travels in buckets.

    Sent is codec(values + residual), and the residual becomes what of that sum was not sent. So everything arrives at
    last, and the sum of what is decoded follows the sum of the values.
    Source: Karimireddy et al., arXiv:1901.09847. Holds two vectors, and one bucket to decode into. Not for two threads.
    """

    def __init__(self, codec: Codec, sizes: Sequence[int]) -> None:
        """Owe nothing yet. `sizes`: values in each bucket."""
        self._codec = codec
        self._owed = np.zeros(sum(sizes), np.float32)
        self._buckets = np.split(self._owed, np.cumsum(sizes)[:-1])
        self._decoded = np.empty(max(sizes, default=0), np.float32)
        self._marked = np.zeros_like(self._owed)

    def encode(self, bucket: int, values: Vector, seed: int = 0, compress: bool = True) -> bytes:
        """The bucket's values and what is owed of those before, as one frame; what it leaves out is owed from now on.

        Values that are not finite are sent, since the receiver judges them, and not owed: they would never leave.
        """
        owed = self._buckets[bucket]
        owed += values
        blob = self._codec.encode(owed, seed, compress)
        with np.errstate(invalid="ignore"):
            owed -= self._codec.decode(blob, owed.size, self._decoded[: owed.size])
        if not np.isfinite(owed).all():
            owed.fill(0)
        return blob

    def residual(self, bucket: int) -> Vector:
        """What is owed of a bucket, as a view that the next `encode` changes."""
        return self._buckets[bucket]

    def mark(self) -> None:
        """Remember what is owed now."""
        np.copyto(self._marked, self._owed)

    def go_back(self) -> None:
        """Owe what was owed at the last `mark`: what has been encoded since then did not count."""
        np.copyto(self._owed, self._marked)
