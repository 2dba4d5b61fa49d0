"""What travels: an update of one micro-batch, or a version's weights, as a message of several frames. Pure.

A message is a list of frames: one for each bucket of the parameters, then one for the buffers and, with weights, one
for the counters. Buffers and counters travel exactly.
"""

import struct
from collections.abc import Iterator, Sequence

import numpy as np
from zlib_ng import zlib_ng

from computeshare.codecs import Codec, frame
from computeshare.codecs.feedback import Feedback
from computeshare.codecs.float32 import Float32
from computeshare.errors import CodecError
from computeshare.tensors.layout import BUCKET, Layout, Weights
from computeshare.types import Blob, Counters, Message, Vector

_EXACT = Float32()
PART_BYTES = 4 * BUCKET
NEWS_BYTES = 1 << 20
_ALIGNED = 64
_HEADERS_BYTES = 8 * (frame.LENGTH_BYTES + frame.HEADER_BYTES)
"""Room for a part's headers, whatever its codec."""


def update_parts(layout: Layout) -> int:
    """How many frames an update has."""
    return len(layout.buckets) + 1


def is_news(layout: Layout) -> bool:
    """Whether a version's weights are small enough to come with the news of it; larger ones are asked for part by part,
    into memory that is there.
    """
    return 4 * (layout.parameters + layout.buffers) <= NEWS_BYTES


def weights_parts(layout: Layout) -> int:
    """How many frames a version's weights have."""
    return len(layout.buckets) + 2


class UpdateEncoder:
    """Makes updates of one layout into messages, a bucket at a time.

    Args:
        feedback: what this sender owes of the updates before, for a codec that wants one.
        compress: as for `Codec.encode`.
    """

    def __init__(self, codec: Codec, layout: Layout, feedback: Feedback | None = None, compress: bool = True) -> None:
        self._encode = feedback.encode if feedback else lambda _, *about: codec.encode(*about)
        self._layout, self._compress = layout, compress
        self.buckets, self.parts = len(layout.buckets), update_parts(layout)

    def bucket(self, index: int, values: Vector, seed: int) -> Blob:
        """The frame of a bucket. `seed`: the unit's."""
        return self._encode(index, values, seed + index, self._compress)

    def buffers(self, values: Vector) -> Blob:
        """The frame of the buffers, the last of a message."""
        return _EXACT.encode(values, 0, self._compress)

    def whole(self, vector: Vector, buffers: Vector, seed: int) -> list[Blob]:
        """One unit's update (d,) and buffers (b,) as a message."""
        frames = [self.bucket(index, vector[where], seed) for index, where in enumerate(self._layout.buckets)]
        return [*frames, self.buffers(buffers)]


def encode_update(codec: Codec, vector: Vector, buffers: Vector, layout: Layout, seed: int) -> list[Blob]:
    """As `UpdateEncoder.whole`, of a sender that keeps nothing in mind."""
    return UpdateEncoder(codec, layout).whole(vector, buffers, seed)


def feedback_of(codec: Codec, layout: Layout) -> Feedback | None:
    """A sender's memory for updates of this layout, if the codec wants one."""
    return Feedback(codec, layout.bucket_sizes) if codec.residual else None


def decode_update(codec: Codec, message: Message, layout: Layout, out: Vector | None = None) -> tuple[Vector, Vector]:
    """Gradient (d,), in `out` if that is given, and buffers (b,) from a message.

    Raises CodecError: not exactly that (values are not judged).
    """
    parts = _whole(message, update_parts(layout))
    return _decoded(codec, parts, layout, out), _EXACT.decode(parts[-1], layout.buffers)


def parts_of(layout: Layout, bucket: int) -> range:
    """The frames of an update that are read with one of its buckets: with the last, the buffers' too."""
    last = len(layout.buckets) - 1
    return range(bucket, bucket + (2 if bucket == last else 1))


def decode_bucket(codec: Codec, frames: Message, layout: Layout, bucket: int, out: Vector) -> tuple[Vector, Vector]:
    """One bucket's gradient, in `out`, and with the last bucket the buffers (b,), with others none (0,).

    Args:
        frames: those that `parts_of` names.
    Raises CodecError: not exactly that (values are not judged).
    """
    there = _whole(frames, len(parts_of(layout, bucket)))
    buffers = _EXACT.decode(there[1], layout.buffers) if len(there) > 1 else np.zeros(0, np.float32)
    return codec.decode(there[0], layout.bucket_sizes[bucket], out), buffers


def largest_update(layout: Layout) -> int:
    """Bytes of the longest message that can be an update: no codec's frames are longer than the values as float32, but
    for their headers.
    """
    return update_parts(layout) * _HEADERS_BYTES + 4 * (layout.parameters + layout.buffers)


def weights_room(layout: Layout) -> list[memoryview]:
    """Memory for each part of a version's weights, however long its codec may make it."""
    values = [*(4 * size for size in layout.bucket_sizes), 4 * layout.buffers, 8 * layout.counters]
    room = np.empty(sum(values) + _HEADERS_BYTES * len(values), np.uint8).data
    ends = np.cumsum([size + _HEADERS_BYTES for size in values]).tolist()
    return [room[start:stop] for start, stop in zip([0, *ends], ends, strict=False)]


def encode_weights(
    codec: Codec, weights: Weights, layout: Layout, seed: int = 0, before: Vector | None = None
) -> Iterator[Blob]:
    """A version's weights as a message. Each part is encoded once it is asked for.

    Args:
        before: parameters (d,); in the place of its own go what is to be added to these.
    """
    scratch = _scratch(layout)
    compress = not codec.exact  # whole weights are too dense for that
    for index, bucket in enumerate(layout.buckets):
        values = weights.parameters[bucket]
        if before is not None:
            values = np.subtract(values, before[bucket], out=scratch[: values.size])
        yield codec.encode(values, seed + index, compress)
    yield _EXACT.encode(weights.buffers)
    yield frame.pack(weights.counters.astype("<i8", copy=False))


def decode_weights(codec: Codec, message: Message, layout: Layout, out: Vector | None = None) -> Weights:
    """The weights in a message, bit for bit as every other receiver gets them; their parameters (d,) in `out` if that
    is given. Raises CodecError: `out` may hold a part of them then.
    """
    parts = _whole(message, weights_parts(layout))
    return Weights(_decoded(codec, parts, layout, out), *_rest(parts, layout))


def add_delta(codec: Codec, message: Message, layout: Layout, before: Weights) -> Weights:
    """The weights after those `before`, from a message of the difference; the bits are everywhere the same.

    Raises CodecError.
    """
    parts = _whole(message, weights_parts(layout))
    after, scratch = np.empty_like(before.parameters), _scratch(layout)
    for bucket, size, part in zip(
        layout.buckets, layout.bucket_sizes, parts, strict=False
    ):  # then come the other parts
        np.add(before.parameters[bucket], codec.decode(part, size, scratch[:size]), out=after[bucket])
    buffers, counters = _rest(parts, layout)
    return Weights(after, buffers.copy(), counters.copy())


def in_parts(pieces: Sequence[Blob]) -> list[Blob]:
    """Bytes, given in any pieces, as parts of a message that are all of about one size: small pieces are joined."""
    parts: list[Blob] = []
    small: list[Blob] = []
    for piece in pieces:
        if len(piece) < PART_BYTES:
            small.append(piece)
            continue
        view = memoryview(piece)
        parts += [b"".join(small), *(view[at : at + PART_BYTES] for at in range(0, len(view), PART_BYTES))]
        small = []
    return [part for part in (*parts, b"".join(small)) if len(part)]


def seal(parts: Sequence[Blob]) -> list[Blob]:
    """Parts that are no frames as a message whose first part is one, of the length and checksum of each of the others:
    they travel as they are, as views.
    """
    return [frame.pack(_index(parts), compress=False), *parts]


def unseal(message: Message) -> None:
    """Check a message that `seal` gave. Raises CodecError: its parts are not those that were sealed."""
    first, *parts = _whole(message, len(message))
    index = _index(parts)
    if frame.unpack(first, len(index)) != index:
        raise CodecError("checksum mismatch: a state was damaged")


def _index(parts: Sequence[Blob]) -> bytes:
    """What is said of parts, as long as leaves what follows its frame aligned."""
    about = b"".join(struct.pack("<QI", len(part), zlib_ng.crc32(part)) for part in parts)
    return about + bytes(-(len(about) + frame.HEADER_BYTES) % _ALIGNED)


def _decoded(codec: Codec, parts: Sequence[Blob], layout: Layout, out: Vector | None) -> Vector:
    """Decode each bucket into its place; a vector of one bucket may lie in the message itself."""
    if out is None and len(layout.buckets) == 1:
        return codec.decode(parts[0], layout.parameters)
    vector = np.empty(layout.parameters, np.float32) if out is None else out
    for bucket, size, part in zip(
        layout.buckets, layout.bucket_sizes, parts, strict=False
    ):  # then come the other parts
        codec.decode(part, size, vector[bucket])
    return vector


def _rest(parts: Sequence[Blob], layout: Layout) -> tuple[Vector, Counters]:
    """The buffers and counters of a version's weights, maybe as views of the message."""
    counters = np.frombuffer(frame.unpack(parts[-1], 8 * layout.counters), "<i8")
    return _EXACT.decode(parts[-2], layout.buffers), counters


def _scratch(layout: Layout) -> Vector:
    """Room for the values of any one bucket."""
    return np.empty(max(layout.bucket_sizes), np.float32)


def _whole(message: Message, count: int) -> list[Blob]:
    parts = [part for part in message if part is not None]
    if len(parts) < len(message):
        raise CodecError(f"truncated: part {list(message).index(None)} of {len(message)} is missing")
    if len(parts) != count:
        raise CodecError(f"wrong length: a message of {len(parts)} parts where {count} are expected")
    return parts
