"""Error feedback: the part of a vector that a codec drops is added to the next vector."""

from collections.abc import Sequence

import numpy as np

from computeshare.codecs.base import Codec
from computeshare.types import Vector


class Feedback:
    """A sender's residual: the part of its updates that the codec has dropped so far, in buckets.

    The sender transmits codec(values + residual); the next residual is that sum minus its decoded value. So the sum of
    the decoded values follows the sum of the values.
    Source: Karimireddy et al., arXiv:1901.09847. Memory: two vectors and one bucket. Not thread-safe.
    """

    def __init__(self, codecs: Sequence[Codec], sizes: Sequence[int]) -> None:
        """Start with a residual of zeros. For each bucket, its codec and its number of values."""
        self._codecs = codecs
        self._owed = [np.zeros(size, np.float32) for size in sizes]
        self._marked = [np.zeros(size, np.float32) for size in sizes]
        """For each bucket encoded since the last `mark`, its residual then; for others, memory for the next."""
        self._changed = set(range(len(sizes)))
        """The buckets encoded since the last `mark`."""
        self._decoded = np.empty(max(sizes, default=0), np.float32)

    def encode(self, bucket: int, values: Vector, seed: int = 0, compress: bool = True) -> bytes:
        """Encode a bucket's values plus its residual as one blob, and keep the difference as the new residual.

        Non-finite values are sent, since the receiver judges them, but the bucket's residual is then set to zero:
        otherwise it would stay non-finite for ever.
        """
        before, codec = self._owed[bucket], self._codecs[bucket]
        if bucket not in self._changed:
            self._swap(bucket)
            self._changed.add(bucket)
        owed = np.add(before, values, out=self._owed[bucket])
        blob = codec.encode(owed, seed, compress)
        with np.errstate(invalid="ignore"):
            owed -= codec.decode(blob, owed.size, self._decoded[: owed.size])
        if not np.isfinite(owed).all():
            owed.fill(0)
        return blob

    def residual(self, bucket: int) -> Vector:
        """A bucket's residual, as a view that is valid until the next `encode`."""
        return self._owed[bucket]

    def mark(self) -> None:
        """Save the residual for `go_back`."""
        self._changed.clear()

    def go_back(self) -> None:
        """Restore the residual of the last `mark`: the updates encoded since then did not count."""
        for bucket in self._changed:
            self._swap(bucket)
        self._changed.clear()

    def _swap(self, bucket: int) -> None:
        self._owed[bucket], self._marked[bucket] = self._marked[bucket], self._owed[bucket]
