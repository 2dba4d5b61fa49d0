"""What travels: an update of one micro-batch, or a version's weights, as one blob of several frames. Pure.

Each part is preceded by its length (four bytes, little-endian). Buffers and counters travel exactly.
"""

import struct

import numpy as np

from computeshare.codecs import Codec, frame
from computeshare.codecs.float32 import Float32
from computeshare.errors import CodecError
from computeshare.layout import Layout, Weights
from computeshare.types import Vector

_LENGTH = struct.Struct("<I")
_EXACT = Float32()


def encode_update(codec: Codec, vector: Vector, buffers: Vector, seed: int) -> bytes:
    """One micro-batch's gradient and buffers as a blob; `seed` is the micro-batch's."""
    return _join(codec.encode(vector, seed), _EXACT.encode(buffers))


def decode_update(codec: Codec, blob: bytes, layout: Layout) -> tuple[Vector, Vector]:
    """Gradient (d,) and buffers (b,) from a blob. Raises CodecError: not exactly that (values are not judged)."""
    vector, buffers = _split(blob, 2)
    return codec.decode(vector, layout.parameters), _EXACT.decode(buffers, layout.buffers)


def largest_update(layout: Layout) -> int:
    """Bytes of the longest blob that can be an update: no codec's frame is longer than the values as float32."""
    return 2 * (_LENGTH.size + frame.HEADER_BYTES) + 4 * (layout.parameters + layout.buffers)


def encode_weights(codec: Codec, weights: Weights) -> bytes:
    """A version's weights as a blob."""
    counters = frame.pack(weights.counters.astype("<i8", copy=False).data)
    return _join(codec.encode(weights.parameters), _EXACT.encode(weights.buffers), counters)


def decode_weights(codec: Codec, blob: bytes, layout: Layout) -> Weights:
    """The weights in a blob, bit for bit as every other receiver gets them. Raises CodecError."""
    parameters, buffers, counters = _split(blob, 3)
    return Weights(
        codec.decode(parameters, layout.parameters),
        _EXACT.decode(buffers, layout.buffers),
        np.frombuffer(frame.unpack(counters, 8 * layout.counters), "<i8"),
    )


def _join(*parts: bytes) -> bytes:
    return b"".join(piece for part in parts for piece in (_LENGTH.pack(len(part)), part))


def _split(blob: bytes, count: int) -> list[memoryview]:
    view = memoryview(blob)
    parts: list[memoryview] = []
    for _ in range(count):
        if len(view) < _LENGTH.size:
            raise CodecError(f"truncated: a message has {count} parts, found {len(parts)}")
        (length,) = _LENGTH.unpack_from(view)
        part, view = view[_LENGTH.size : _LENGTH.size + length], view[_LENGTH.size + length :]
        if len(part) != length:
            raise CodecError(f"truncated: a part of {length} bytes ends after {len(part)}")
        parts.append(part)
    if len(view):
        raise CodecError(f"wrong length: {len(view)} bytes after the last part")
    return parts
