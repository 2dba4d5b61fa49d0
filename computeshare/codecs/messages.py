"""What travels: an update of one micro-batch, or a version's weights, as one blob of several frames. Pure.

Each part is preceded by its length (four bytes, little-endian). Buffers and counters travel exactly.
"""

import numpy as np

from computeshare.codecs import Codec, frame
from computeshare.codecs.float32 import Float32
from computeshare.layout import Layout, Weights
from computeshare.types import Vector

_EXACT = Float32()


def encode_update(codec: Codec, vector: Vector, buffers: Vector, seed: int = 0) -> bytes:
    """One micro-batch's gradient and buffers as a blob; `seed` is the micro-batch's."""
    return frame.join((codec.encode(vector, seed), _EXACT.encode(buffers)))


def decode_update(codec: Codec, blob: bytes, layout: Layout) -> tuple[Vector, Vector]:
    """Gradient (d,) and buffers (b,) from a blob. Raises CodecError: not exactly that (values are not judged)."""
    vector, buffers = frame.split(blob, 2)
    return codec.decode(vector, layout.parameters), _EXACT.decode(buffers, layout.buffers)


def largest_update(layout: Layout) -> int:
    """Bytes of the longest blob that can be an update: no codec's frames are longer than the values as float32, but for
    their headers.
    """
    headers = 8 * (frame.LENGTH_BYTES + frame.HEADER_BYTES)
    return headers + 4 * (layout.parameters + layout.buffers)


def encode_weights(codec: Codec, weights: Weights) -> bytes:
    """A version's weights as a blob."""
    counters = frame.pack(weights.counters.astype("<i8", copy=False))
    return frame.join((codec.encode(weights.parameters), _EXACT.encode(weights.buffers), counters))


def decode_weights(codec: Codec, blob: bytes, layout: Layout) -> Weights:
    """The weights in a blob, bit for bit as every other receiver gets them. Raises CodecError."""
    parameters, buffers, counters = frame.split(blob, 3)
    return Weights(
        codec.decode(parameters, layout.parameters),
        _EXACT.decode(buffers, layout.buffers),
        np.frombuffer(frame.unpack(counters, 8 * layout.counters), "<i8"),
    )
