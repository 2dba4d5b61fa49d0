"""Whatever a sender puts in a blob, a reader gets a CodecError or the right shape, in bounded memory.

COMPUTESHARE_BLOBS sets how many blobs (3,000), COMPUTESHARE_SEED the seed (another for each commit).
"""

import os
import random
import struct
import zlib
from collections.abc import Callable

import numpy as np
import psutil
import pytest
import zstandard

from computeshare.codecs import frame
from computeshare.codecs.messages import decode_update, encode_update
from computeshare.codecs.registry import CODECS
from computeshare.errors import CodecError
from computeshare.tensors.layout import Layout
from tests.support import sample

BLOBS = int(os.environ.get("COMPUTESHARE_BLOBS", "3000"))
SEED = sample.seed()
GROWTH_BYTES = 64 << 20
BOMB_BYTES = 512 << 20
LAYOUT = Layout.build(iter([("w", (40, 50), "parameter"), ("b", (50,), "parameter"), ("mean", (50,), "buffer")]))

Mutate = Callable[[bytes, random.Random], bytes]


def flip(blob: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(blob)
    for _ in range(rng.choice((1, 1, 2, 8))):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def truncate(blob: bytes, rng: random.Random) -> bytes:
    return blob[: rng.randrange(len(blob))]


def extend(blob: bytes, rng: random.Random) -> bytes:
    return blob + rng.randbytes(rng.randint(1, 64))


def splice(blob: bytes, rng: random.Random) -> bytes:
    """A piece of the blob lands elsewhere in it."""
    start, where = rng.randrange(len(blob)), rng.randrange(len(blob))
    piece = blob[start : start + rng.randint(1, 200)]
    return blob[:where] + piece + blob[where + len(piece) * rng.randint(0, 1) :]


def reorder(blob: bytes, rng: random.Random) -> bytes:
    """The parts in another order, or one of them twice."""
    return b"".join(rng.choices(_parts(blob), k=rng.randint(1, 3)))


def lie_about_lengths(blob: bytes, rng: random.Random) -> bytes:
    length = rng.choice((0, 1, 7, 8, 9, len(blob), 0x7FFFFFFF, 0xFFFFFFFF, rng.getrandbits(32)))
    return struct.pack("<I", length) + blob[4:]


def forge_header(blob: bytes, rng: random.Random) -> bytes:
    """A right checksum on a kind or a body that is not, in any frame of the vector's."""
    vector, buffers = _parts(blob)
    frames = _frames(vector[4:])
    which = rng.randrange(len(frames))
    body = flip(frames[which][8:], rng) or b"x"
    kind = frames[which][3] if rng.randrange(2) else rng.randrange(4)
    frames[which] = struct.pack("<3sBI", rng.choice((b"CSF", b"CSF", b"CSG")), kind, zlib.crc32(body)) + body
    return _with_length(_joined(frames)) + buffers


def shuffle_frames(blob: bytes, rng: random.Random) -> bytes:
    """The vector's frames in another order, one of them twice, or one too few or too many."""
    vector, buffers = _parts(blob)
    frames = _frames(vector[4:])
    return _with_length(_joined(rng.choices(frames, k=rng.randint(0, len(frames) + 1)))) + buffers


def wrong_size(blob: bytes, rng: random.Random) -> bytes:
    """A well-formed update of another model."""
    weights, buffers = (np.zeros(rng.choice((0, 1, 49, 51, 2049, 2051, 9000)), np.float32) for _ in range(2))
    other = Layout.build(iter([("w", weights.shape, "parameter"), ("b", buffers.shape, "buffer")]))
    return frame.join(encode_update(CODECS[rng.choice(tuple(CODECS))], weights, buffers, other, rng.randrange(100)))


def bomb(blob: bytes, rng: random.Random) -> bytes:
    """Compressed zeros, half a gigabyte of them; the stated size is true, missing or the one a reader expects."""
    vector, buffers = _parts(blob)
    frames, body = _frames(vector[4:]), rng.choice(_bombs())
    frames[rng.randrange(len(frames))] = struct.pack("<3sBI", b"CSF", 1, zlib.crc32(body)) + body
    return _with_length(_joined(frames)) + buffers


def garbage(blob: bytes, rng: random.Random) -> bytes:
    return rng.randbytes(rng.randint(0, 4000))


MUTATIONS: tuple[Mutate, ...] = (
    flip,
    truncate,
    extend,
    splice,
    reorder,
    lie_about_lengths,
    forge_header,
    shuffle_frames,
    wrong_size,
    bomb,
    garbage,
)


def _parts(blob: bytes) -> list[bytes]:
    (length,) = struct.unpack_from("<I", blob)
    return [blob[: 4 + length], blob[4 + length :]]


def _frames(vector: bytes) -> list[bytes]:
    """The frames of a vector: one, or several with their lengths before them."""
    if vector.startswith(b"CSF"):
        return [vector]
    frames = []
    while vector:
        (length,) = struct.unpack_from("<I", vector)
        frames.append(vector[4 : 4 + length])
        vector = vector[4 + length :]
    return frames


def _with_length(part: bytes) -> bytes:
    return struct.pack("<I", len(part)) + part


def _joined(frames: list[bytes]) -> bytes:
    return frames[0] if len(frames) == 1 else b"".join(map(_with_length, frames))


_made: list[bytes] = []


def _bombs() -> list[bytes]:
    """Small bodies that decompress to far more than a model of this size; made once."""
    if not _made:
        piece = bytes(1 << 20)
        for stated in (-1, BOMB_BYTES):
            writer = zstandard.ZstdCompressor(level=1).compressobj(size=stated)
            pieces = [writer.compress(piece) for _ in range(BOMB_BYTES >> 20)]
            _made.append(b"".join((*pieces, writer.flush())))
        for expected in (LAYOUT.parameters, 4 * LAYOUT.parameters):
            one = zstandard.ZstdCompressor(level=1).compress(bytes(expected))
            _made.append(one + _made[0])  # a whole frame of the expected size, then the bomb
            _made.append(_restated(expected))
    return _made


def _restated(size: int) -> bytes:
    """A frame whose header states `size` while its blocks hold sixty-four times as much."""
    true = zstandard.ZstdCompressor(level=1).compress(bytes(64 * size))
    lying = true.replace(struct.pack("<I", 64 * size), struct.pack("<I", size), 1)
    assert zstandard.get_frame_parameters(lying).content_size == size
    return lying


def blob_of(codec: str, kind: int, rng: random.Random) -> bytes:
    """An update as an honest worker sends it: noise, which is sent raw, or sparse, which is compressed."""
    values = np.random.default_rng(rng.getrandbits(32)).normal(0, 1e-3, LAYOUT.parameters).astype(np.float32)
    if kind:
        values[np.arange(LAYOUT.parameters) % 16 != 0] = 0
    return frame.join(encode_update(CODECS[codec], values, np.ones(LAYOUT.buffers, np.float32), LAYOUT, 0))


def decode_or_refuse(codec: str, blob: bytes) -> bool:
    """Whether the blob was accepted; fails unless it then is an update of the right shape."""
    try:
        gradient, buffers = decode_update(CODECS[codec], frame.split(blob, 2), LAYOUT)
    except CodecError:
        return False
    assert (gradient.shape, buffers.shape) == ((LAYOUT.parameters,), (LAYOUT.buffers,))
    assert gradient.dtype == buffers.dtype == np.dtype(np.float32)
    return True


@pytest.mark.parametrize("codec", CODECS)
def test_a_mutated_blob_is_refused_or_right_and_costs_bounded_memory(codec: str) -> None:
    rng = random.Random(f"{SEED} {codec}")
    originals = [blob_of(codec, kind, rng) for kind in (0, 1) for _ in range(4)]
    _bombs()
    for name in CODECS:
        blob_of(name, 0, rng)  # imports torch
    process = psutil.Process()
    before, peak = process.memory_info().rss, 0
    for index in range(BLOBS // len(CODECS)):
        original = rng.choice(originals)
        mutation = MUTATIONS[index % len(MUTATIONS)]
        blob = mutation(original, rng)
        told = f"blob {index} of seed {SEED}, {mutation.__name__}"
        try:
            took = decode_or_refuse(codec, blob)
        except Exception as error:
            raise AssertionError(f"{told}: {error!r}") from error
        # Where checksums are true, the values are for the reducer to judge.
        told_whole = mutation in (forge_header, shuffle_frames)
        assert not took or blob == original or told_whole, f"{told}: accepted though it was damaged"
        peak = max(peak, process.memory_info().rss - before)
    assert peak < GROWTH_BYTES, f"{peak >> 20} MB more memory than before"


@pytest.mark.parametrize("codec", CODECS)
def test_a_blob_that_nobody_touched_gives_the_values_it_was_made_of(codec: str) -> None:
    rng = random.Random(SEED)
    for kind in (0, 1):
        blob = blob_of(codec, kind, rng)
        gradient, buffers = decode_update(CODECS[codec], frame.split(blob, 2), LAYOUT)
        if not CODECS[codec].differences:  # such codecs have no fixed grid
            assert frame.join(encode_update(CODECS[codec], gradient, buffers, LAYOUT, 0)) == blob
