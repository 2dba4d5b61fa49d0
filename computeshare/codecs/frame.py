"""A frame: bytes with a checksum, compressed where that pays, and of bounded size when read.

Layout: `CSF` and a kind byte (0 raw, 1 zstd), the crc32 of the body (little-endian), the body. Several frames can be
joined into one blob, each preceded by its length (four bytes, little-endian), so that different kinds of data are
compressed separately.
"""

import struct
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import zstandard
from zlib_ng import zlib_ng

from computeshare.errors import CodecError
from computeshare.types import Blob

Raw = bytes | bytearray | memoryview | npt.NDArray[np.generic]
"""Contiguous bytes, or an array's bytes in this machine's byte order."""
_HEADER = struct.Struct("<3sBI")
HEADER_BYTES = _HEADER.size
_LENGTH = struct.Struct("<I")
LENGTH_BYTES = _LENGTH.size
_MAGIC = b"CSF"
_RAW, _ZSTD = 0, 1
_WINS = 0.9  # a body that shrinks by less (dense float32 weights do: 8 %) costs both ends more time than it saves
_LARGEST_SAMPLE, _SMALLEST_SAMPLE = 1 << 15, 1 << 12


class _Contexts(threading.local):
    """A zstd compressor and decompressor per thread: creating them takes longer than compressing a small vector.

    Level 1 with a small table and matches of at least 7 bytes: gradients are compressed by the frequencies of their
    bytes alone, and searching for rare matches takes longer.
    """

    def __init__(self) -> None:
        parameters = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=12, window_log=19)
        self.compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


def pack(raw: Raw, compress: bool = True) -> bytes:
    """Frame `raw`; with `compress`, zstd level 1 is used if it saves at least 10 %."""
    view = _bytes_of(raw)
    kind, body = _RAW, view
    if compress and _shrinks(view):
        compressed = _contexts.compressor.compress(view)
        if len(compressed) < _WINS * len(view):
            kind, body = _ZSTD, memoryview(compressed)
    return b"".join((_HEADER.pack(_MAGIC, kind, zlib_ng.crc32(body)), body))


def unpack(blob: Blob, raw_bytes: int) -> memoryview:
    """The `raw_bytes` bytes inside the frame `blob`; allocates no more than that.

    Raises CodecError: too short, no frame, a wrong checksum, or another length.
    """
    view = memoryview(blob).cast("B")
    if len(view) < _HEADER.size:
        raise CodecError(f"truncated: {len(view)} bytes are no frame")
    magic, kind, checksum = _HEADER.unpack_from(view)
    body = view[_HEADER.size :]
    if magic != _MAGIC or kind not in (_RAW, _ZSTD):
        raise CodecError("not a frame: unknown header")
    if len(body) > raw_bytes:
        raise CodecError(f"wrong length: {len(body)} bytes where at most {raw_bytes} are expected")
    if zlib_ng.crc32(body) != checksum:
        raise CodecError("checksum mismatch: the blob was damaged on its way")
    raw = _decompress(body, raw_bytes) if kind == _ZSTD else body
    if len(raw) != raw_bytes:
        raise CodecError(f"wrong length: {len(raw)} bytes where {raw_bytes} are expected")
    return raw


def pack_all(raws: Sequence[Raw], compress: bool = True) -> bytes:
    """Frame each of `raws`, and join the frames into one blob."""
    return join([pack(raw, compress) for raw in raws])


def unpack_all(blob: Blob, raw_bytes: Sequence[int]) -> list[memoryview]:
    """Split a blob and unpack its frames to these lengths. Raises CodecError: they are not exactly these."""
    return [unpack(part, size) for part, size in zip(split(blob, len(raw_bytes)), raw_bytes, strict=True)]


def join(parts: Sequence[bytes]) -> bytes:
    """Join parts into one blob, each preceded by its length."""
    return b"".join(piece for part in parts for piece in (_LENGTH.pack(len(part)), part))


def is_single(blob: Blob) -> bool:
    """Whether a blob is a single frame, not joined parts: as a part's length, `CSF` would be over 4.6 million."""
    return memoryview(blob).cast("B")[: len(_MAGIC)] == _MAGIC


def split(blob: Blob, count: int) -> list[memoryview]:
    """The `count` parts of a blob, as views. Raises CodecError: fewer or more parts, or trailing bytes."""
    view = memoryview(blob).cast("B")
    parts: list[memoryview] = []
    for _ in range(count):
        if len(view) < _LENGTH.size:
            raise CodecError(f"truncated: {count} parts are expected, found {len(parts)}")
        (length,) = _LENGTH.unpack_from(view)
        part, view = view[_LENGTH.size : _LENGTH.size + length], view[_LENGTH.size + length :]
        if len(part) != length:
            raise CodecError(f"truncated: a part of {length} bytes ends after {len(part)}")
        parts.append(part)
    if len(view):
        raise CodecError(f"wrong length: {len(view)} bytes after the last part")
    return parts


def _bytes_of(raw: Raw) -> memoryview:
    view = raw.data if isinstance(raw, np.ndarray) else memoryview(raw)
    return view.cast("B") if view.nbytes else memoryview(b"")  # an empty view of several dimensions cannot be cast


def _shrinks(view: memoryview) -> bool:
    """Whether compression seems to pay, judged by two samples of the body, which costs little if it does not."""
    size = min(_LARGEST_SAMPLE, len(view) // 16)
    if size < _SMALLEST_SAMPLE:
        return True
    pieces = [view[len(view) * quarter // 4 :][:size] for quarter in (1, 3)]
    return sum(len(_contexts.compressor.compress(piece)) for piece in pieces) < _WINS * 2 * size


def _decompress(body: memoryview, raw_bytes: int) -> memoryview:
    # zstandard ignores max_output_size when a frame states its own size, so that size is checked first.
    try:
        stated = zstandard.get_frame_parameters(body).content_size
        if stated != raw_bytes:
            raise CodecError(f"wrong length: the frame states {stated} bytes where {raw_bytes} are expected")
        return memoryview(_contexts.decompressor.decompress(body, allow_extra_data=False))
    except zstandard.ZstdError as error:
        raise CodecError(f"damaged compression: {error}") from error
