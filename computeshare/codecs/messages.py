"""Messages: an update of one micro-batch, or a version's weights, as a list of frames. Pure.

A message has a frame for each bucket of the parameters, then a frame for the buffers and, with weights, a frame for the
counters. Buffers and counters are encoded exactly. Where workers hold stages of the model, and so read some of the
frames of a version's weights, a last frame holds the digests of all others.
"""

import hashlib
import struct
from collections.abc import Iterator, Sequence

import numpy as np
from zlib_ng import zlib_ng

from computeshare.codecs import frame
from computeshare.codecs.base import Codec
from computeshare.codecs.feedback import Feedback
from computeshare.codecs.registry import EXACT
from computeshare.errors import CodecError
from computeshare.tensors.layout import BUCKET, Layout, Weights
from computeshare.types import Blob, Counters, Message, Vector

PART_BYTES = 4 * BUCKET
NEWS_BYTES = 1 << 20
_ALIGNED = 64
_DIGEST_BYTES = 32
_HEADERS_BYTES = 8 * (frame.LENGTH_BYTES + frame.HEADER_BYTES)
"""Most bytes of headers in a part, whatever its codec."""


def update_parts(layout: Layout) -> int:
    """The number of frames in an update."""
    return len(layout.buckets) + 1


def is_news(layout: Layout) -> bool:
    """Whether a version's weights are small enough to be sent together with the announcement of the version.

    Larger weights are fetched part by part, into memory that the receiver already has.
    """
    return 4 * (layout.parameters + layout.buffers) <= NEWS_BYTES


def weights_parts(layout: Layout) -> int:
    """The number of frames in a version's weights."""
    return len(layout.buckets) + 2 + bool(layout.cuts)


def fitted(codec: Codec, layout: Layout) -> list[Codec]:
    """The codec for each bucket of the parameters."""
    return [codec.fitted(pieces) for pieces in layout.pieces]


class UpdateEncoder:
    """Encodes updates of one layout as messages, bucket by bucket.

    Args:
        feedback: this sender's residual, for a codec with error feedback.
        compress: as for `Codec.encode`.
    """

    def __init__(self, codec: Codec, layout: Layout, feedback: Feedback | None = None, compress: bool = True) -> None:
        codecs = fitted(codec, layout)
        self._encode = feedback.encode if feedback else lambda bucket, *about: codecs[bucket].encode(*about)
        self._layout, self._compress = layout, compress
        self.buckets, self.parts = len(layout.buckets), update_parts(layout)

    def part(self, index: int, values: Vector, seed: int) -> Blob:
        """The frame of bucket `index`, from its values, or after the buckets that of the buffers (b,). `seed`: the work
        unit's seed.
        """
        if index == self.buckets:
            return self.buffers(values)
        return self._encode(index, values, seed + index, self._compress)

    def buffers(self, values: Vector) -> Blob:
        """The frame of the buffers (b,), the last of a message."""
        return EXACT.encode(values, 0, self._compress)

    def whole(self, vector: Vector, buffers: Vector, seed: int) -> list[Blob]:
        """Encode one work unit's update (d,) and buffers (b,) as a message."""
        frames = [self.part(index, vector[where], seed) for index, where in enumerate(self._layout.buckets)]
        return [*frames, self.buffers(buffers)]


def encode_update(codec: Codec, vector: Vector, buffers: Vector, layout: Layout, seed: int) -> list[Blob]:
    """As `UpdateEncoder.whole`, for a sender without error feedback."""
    return UpdateEncoder(codec, layout).whole(vector, buffers, seed)


def feedback_of(codec: Codec, layout: Layout) -> Feedback | None:
    """A zero residual for updates of this layout, if the codec needs error feedback."""
    return Feedback(fitted(codec, layout), layout.bucket_sizes) if codec.residual else None


def decode_update(codec: Codec, message: Message, layout: Layout, out: Vector | None = None) -> tuple[Vector, Vector]:
    """Decode a message into its gradient (d,), in `out` if given, and buffers (b,).

    Raises CodecError: the message is malformed. The values are not judged.
    """
    parts = _whole(message, update_parts(layout))
    return _decoded(codec, parts, layout, out), EXACT.decode(parts[-1], layout.buffers)


def parts_of(layout: Layout, bucket: int) -> range:
    """The indices of the frames read with one of an update's buckets; the last bucket's include the buffers' frame."""
    last = len(layout.buckets) - 1
    return range(bucket, bucket + (2 if bucket == last else 1))


def decode_bucket(codec: Codec, frames: Message, layout: Layout, bucket: int, out: Vector) -> tuple[Vector, Vector]:
    """Decode one bucket's gradient into `out`; with the last bucket also the buffers (b,), else an empty vector.

    Args:
        frames: the frames that `parts_of` names.
    Raises CodecError: they are malformed. The values are not judged.
    """
    there = _whole(frames, len(parts_of(layout, bucket)))
    buffers = EXACT.decode(there[1], layout.buffers) if len(there) > 1 else np.zeros(0, np.float32)
    return codec.fitted(layout.pieces[bucket]).decode(there[0], layout.bucket_sizes[bucket], out), buffers


def largest_update(layout: Layout) -> int:
    """The size limit of an update in bytes: without headers, no codec's frames exceed the values as float32."""
    return update_parts(layout) * _HEADERS_BYTES + 4 * (layout.parameters + layout.buffers)


def weights_room(layout: Layout) -> list[memoryview]:
    """Memory to receive each part of a version's weights, large enough for every codec."""
    values = [*(4 * size for size in layout.bucket_sizes), 4 * layout.buffers, 8 * layout.counters]
    values += [_DIGEST_BYTES * len(values)] if layout.cuts else []
    room = np.empty(sum(values) + _HEADERS_BYTES * len(values), np.uint8).data
    ends = np.cumsum([size + _HEADERS_BYTES for size in values]).tolist()
    return [room[start:stop] for start, stop in zip([0, *ends], ends, strict=False)]


def encode_weights(
    codec: Codec, weights: Weights, layout: Layout, seed: int = 0, before: Vector | None = None
) -> Iterator[Blob]:
    """Encode a version's weights as a message; each part is encoded on demand.

    Args:
        before: the previous version's parameters (d,); if given, the parameters are sent as the difference from them.
    """
    parts = _encoded_weights(codec, weights, layout, seed, before)
    if not layout.cuts:
        yield from parts
        return
    digests = b""
    for part in parts:
        digests += _digest(part)
        yield part
    yield frame.pack(digests, compress=False)


def _encoded_weights(
    codec: Codec, weights: Weights, layout: Layout, seed: int, before: Vector | None
) -> Iterator[Blob]:
    scratch = _scratch(layout)
    compress = not codec.exact  # whole weights are too dense for that
    for index, bucket in enumerate(layout.buckets):
        values = weights.parameters[bucket]
        if before is not None:
            values = np.subtract(values, before[bucket], out=scratch[: values.size])
        yield codec.fitted(layout.pieces[index]).encode(values, seed + index, compress)
    yield from encode_rest(weights.buffers, weights.counters)


def encode_rest(buffers: Vector, counters: Counters) -> list[Blob]:
    """The frames of a version's buffers (b,) and counters (c,), which follow those of its buckets."""
    return [EXACT.encode(buffers), frame.pack(counters.astype("<i8", copy=False))]


def encode_weights_bucket(
    codec: Codec, values: Vector, layout: Layout, index: int, seed: int, before: Vector | None, out: Vector | None
) -> Blob:
    """The frame of one bucket of a version's parameters, as `encode_weights` makes it.

    Args:
        values, before: of this bucket; the others as for `encode_weights`.
        out: becomes the bucket as workers decode it; None: it is not wanted.
    """
    one = codec.fitted(layout.pieces[index])
    blob = one.encode(values if before is None else np.subtract(values, before), seed + index, not codec.exact)
    if out is not None:
        decoded = one.decode(blob, values.size, out)
        if before is not None:
            np.add(before, decoded, out=out)
    return blob


def decode_some(
    codec: Codec, frames: Sequence[Blob | None], buckets: Sequence[int], layout: Layout
) -> tuple[dict[int, Vector], Vector, Counters]:
    """Decode some buckets of a version's weights: their parameters by bucket, all buffers (b,), all counters (c,).

    Args:
        frames: those of `buckets`, then the version's last three: buffers, counters, digests.
    Raises CodecError: they are malformed, or not those whose digests were published.
    """
    parts, count = _whole(frames, len(buckets) + 3), len(layout.buckets)
    digests = frame.unpack(parts[-1], _DIGEST_BYTES * (count + 2))
    for index, part in zip([*buckets, count, count + 1], parts, strict=False):
        if digests[_DIGEST_BYTES * index :][:_DIGEST_BYTES] != _digest(part):
            raise CodecError(f"digest mismatch: part {index} of the weights was damaged")
    some = zip(buckets, parts, strict=False)
    values = {one: codec.fitted(layout.pieces[one]).decode(part, layout.bucket_sizes[one]) for one, part in some}
    return values, *_rest(parts[-3:-1], layout)


def _digest(part: Blob) -> bytes:
    return hashlib.sha256(part).digest()


def decode_weights(codec: Codec, message: Message, layout: Layout, out: Vector | None = None) -> Weights:
    """Decode the weights in a message, bit for bit the same on every receiver; the parameters (d,) into `out` if given.

    Raises CodecError: the message is malformed; `out` may have been changed.
    """
    parts = _whole(message, weights_parts(layout))
    return Weights(_decoded(codec, parts, layout, out), *_rest(parts[len(layout.buckets) :], layout))


def add_delta(codec: Codec, message: Message, layout: Layout, before: Weights) -> Weights:
    """The weights that follow `before`, from a message of the difference; bit for bit the same on every receiver.

    Raises CodecError: the message is malformed.
    """
    parts = _whole(message, weights_parts(layout))
    after, scratch = np.empty_like(before.parameters), _scratch(layout)
    for one, bucket, size, part in zip(
        fitted(codec, layout), layout.buckets, layout.bucket_sizes, parts, strict=False
    ):  # then come the other parts
        np.add(before.parameters[bucket], one.decode(part, size, scratch[:size]), out=after[bucket])
    return Weights(after, *_rest(parts[len(layout.buckets) :], layout))


def in_parts(pieces: Sequence[Blob]) -> list[Blob]:
    """Regroup bytes into a message's parts of similar size: small pieces are joined, large pieces are cut."""
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
    """A message of `parts` that are no frames: a first part holds the length and checksum of each of the others.

    The parts themselves travel unchanged, as views.
    """
    return [frame.pack(_index(parts), compress=False), *parts]


def unseal(message: Message) -> None:
    """Check a message made by `seal`. Raises CodecError: its parts differ from the sealed parts."""
    first, *parts = _whole(message, len(message))
    index = _index(parts)
    if frame.unpack(first, len(index)) != index:
        raise CodecError("checksum mismatch: a state was damaged")


def _index(parts: Sequence[Blob]) -> bytes:
    """The length and checksum of each part, padded so that the data after this frame stays aligned."""
    about = b"".join(struct.pack("<QI", len(part), zlib_ng.crc32(part)) for part in parts)
    return about + bytes(-(len(about) + frame.HEADER_BYTES) % _ALIGNED)


def _decoded(codec: Codec, parts: Sequence[Blob], layout: Layout, out: Vector | None) -> Vector:
    """Decode all buckets into one vector; that of a single bucket may be a view of the message."""
    if out is None and len(layout.buckets) == 1:
        return codec.fitted(layout.pieces[0]).decode(parts[0], layout.parameters)
    vector = np.empty(layout.parameters, np.float32) if out is None else out
    for one, bucket, size, part in zip(
        fitted(codec, layout), layout.buckets, layout.bucket_sizes, parts, strict=False
    ):  # then come the other parts
        one.decode(part, size, vector[bucket])
    return vector


def _rest(parts: Sequence[Blob], layout: Layout) -> tuple[Vector, Counters]:
    """Copies of the buffers and counters of a version's weights, from the frames after the parameters: as views, they
    would keep the memory of the whole message.
    """
    counters = np.frombuffer(frame.unpack(parts[1], 8 * layout.counters), "<i8")
    return EXACT.decode(parts[0], layout.buffers).copy(), counters.copy()


def _scratch(layout: Layout) -> Vector:
    """Memory for the values of any one bucket."""
    return np.empty(max(layout.bucket_sizes), np.float32)


def _whole(message: Message, count: int) -> list[Blob]:
    parts = [part for part in message if part is not None]
    if len(parts) < len(message):
        raise CodecError(f"truncated: part {list(message).index(None)} of {len(message)} is missing")
    if len(parts) != count:
        raise CodecError(f"wrong length: a message of {len(parts)} parts where {count} are expected")
    return parts
