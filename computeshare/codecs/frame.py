"""A frame: raw bytes with a checksum, compressed where that wins, bounded when read.

Layout: `CSF` and a kind byte (0 raw, 1 zstd), the crc32 of the body (little-endian), the body.
"""

import struct
import zlib

import zstandard

from computeshare.errors import CodecError
from computeshare.types import Blob

_HEADER = struct.Struct("<3sBI")
HEADER_BYTES = _HEADER.size
_MAGIC = b"CSF"
_RAW, _ZSTD = 0, 1
_WINS = 0.9  # a body that shrinks by less (dense float32 weights do: 8 %) costs both ends more time than it saves
_SAMPLE = 1 << 16


def pack(raw: Blob) -> bytes:
    """Frame `raw`, compressed by zstd level 1 if that saves at least 10 %."""
    view = memoryview(raw).cast("B")
    kind, body = _RAW, view
    if _shrinks(view):
        compressed = zstandard.ZstdCompressor(level=1).compress(view)
        if len(compressed) < _WINS * len(view):
            kind, body = _ZSTD, memoryview(compressed)
    return b"".join((_HEADER.pack(_MAGIC, kind, zlib.crc32(body)), body))


def unpack(blob: Blob, raw_bytes: int) -> memoryview:
    """The `raw_bytes` bytes inside `blob`, never allocating more than that for them.

    Raises CodecError: too short, not a frame, checksum, or another length than asked for.
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
    if zlib.crc32(body) != checksum:
        raise CodecError("checksum mismatch: the blob was damaged on its way")
    raw = _decompress(body, raw_bytes) if kind == _ZSTD else body
    if len(raw) != raw_bytes:
        raise CodecError(f"wrong length: {len(raw)} bytes where {raw_bytes} are expected")
    return raw


def _shrinks(view: memoryview) -> bool:
    """Judge a large body by a piece from its middle, which costs little where compression is useless."""
    if len(view) <= 4 * _SAMPLE:
        return True
    middle = view[len(view) // 2 :][:_SAMPLE]
    return len(zstandard.ZstdCompressor(level=1).compress(middle)) < _WINS * len(middle)


def _decompress(body: memoryview, raw_bytes: int) -> memoryview:
    # zstandard ignores max_output_size when a frame states its own size, so that size is checked first.
    try:
        stated = zstandard.get_frame_parameters(body).content_size
        if stated != raw_bytes:
            raise CodecError(f"wrong length: the frame states {stated} bytes where {raw_bytes} are expected")
        return memoryview(zstandard.ZstdDecompressor().decompress(body, allow_extra_data=False))
    except zstandard.ZstdError as error:
        raise CodecError(f"damaged compression: {error}") from error
