"""What the lossy codecs lose: a step of a block, all but the largest; and with error feedback nothing for good."""

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from computeshare.codecs import frame
from computeshare.codecs.feedback import Feedback
from computeshare.codecs.registry import CODECS
from computeshare.codecs.topk import CHUNK, LEVELS, TopK
from computeshare.errors import CodecError
from computeshare.types import Vector

INT8, TOPK = CODECS["int8"], TopK()
BLOCKED = pytest.mark.parametrize(("name", "block", "steps"), [("int8", 512, 127), ("int4", 128, 7)])
GRADIENT = (np.random.default_rng(0).standard_t(3, 3 * CHUNK + 700) * 1e-3).astype(np.float32)


def sent(values: Vector, codec: TopK = TOPK) -> Vector:
    return codec.decode(codec.encode(values), values.size)


@BLOCKED
@given(
    vector=arrays.arrays(
        np.float32, st.integers(0, 1500), elements=st.floats(-(2.0**126), 2.0**126, width=32) | st.just(np.inf)
    )
)
def test_integers_are_within_a_step_of_their_block_and_pass_on_what_is_not_finite(
    vector: Vector, name: str, block: int, steps: int
) -> None:
    codec = CODECS[name]
    got = codec.decode(codec.encode(vector, 3), len(vector))
    for start in range(0, len(vector), block):
        part, back = vector[start : start + block], got[start : start + block]
        if not np.isfinite(part).all():
            assert not np.isfinite(back).all()
        else:
            step = float(np.abs(part.astype(np.float64)).max()) / (0.999 * steps)
            assert (np.abs(back.astype(np.float64) - part) <= max(step, 1e-37)).all()


@BLOCKED
def test_integers_are_rounded_by_the_seed_alone_and_without_bias(name: str, block: int, steps: int) -> None:
    vector, codec = GRADIENT[:2000], CODECS[name]
    assert codec.encode(vector, 1) == codec.encode(vector.copy(), 1) != codec.encode(vector, 2)
    rounded = np.stack([codec.decode(codec.encode(vector, seed), vector.size) for seed in range(400)])
    step = np.abs(vector).max() / steps
    assert np.abs(rounded.mean(axis=0) - vector).max() < 5 * step / 2 / np.sqrt(400)


@BLOCKED
def test_neighbouring_seeds_round_independently(name: str, block: int, steps: int) -> None:
    vector, codec = GRADIENT[:2000], CODECS[name]
    errors = np.stack([codec.decode(codec.encode(vector, seed), vector.size) - vector for seed in range(8)])
    assert np.abs(np.corrcoef(errors) - np.eye(8)).max() < 0.15


@BLOCKED
def test_a_level_that_no_sender_makes_is_refused(name: str, block: int, steps: int) -> None:
    codec = CODECS[name]
    for values in (np.full(block, -1, np.float32), np.zeros(block + 1, np.float32)):
        blob = bytearray(codec.encode(values, compress=False))
        body = blob.rindex(b"CSF") + 8
        blob[-1] = 0x88 if name == "int4" else 0x80  # the last levels: -8 twice, or -128
        blob[body - 4 : body] = zlib.crc32(blob[body:]).to_bytes(4, "little")
        with pytest.raises(CodecError, match="none of this codec's"):
            codec.decode(bytes(blob), values.size)


def test_int4_takes_half_a_byte_per_value() -> None:
    values = np.random.default_rng(2).normal(size=1 << 18).astype(np.float32)
    assert len(CODECS["int4"].encode(values, compress=False)) < 0.54 * values.size


def test_topk_keeps_the_largest_values_of_each_chunk_and_zeros_for_the_rest() -> None:
    got = sent(GRADIENT)
    for start in range(0, GRADIENT.size, CHUNK):
        chunk, back = GRADIENT[start : start + CHUNK], got[start : start + CHUNK]
        kept = -(-chunk.size // 64)
        largest = np.sort(np.argsort(-np.abs(chunk))[:kept])
        scale = np.abs(chunk).max() / LEVELS
        assert np.array_equal(np.flatnonzero(back), largest[np.abs(chunk[largest]) > scale / 2])
        assert np.abs(back - chunk)[largest].max() <= scale * 0.5001


@given(
    vector=arrays.arrays(
        np.float32, st.integers(0, 9000), elements=st.floats(-(2.0**60), 2.0**60, width=32), fill=st.just(0.0)
    )
)
def test_topk_is_never_further_from_the_values_than_nothing_would_be(vector: Vector) -> None:
    wide = vector.astype(np.float64)
    assert np.square(sent(vector) - wide).sum() <= np.square(wide).sum() * (1 + 1e-6)


def test_of_equal_magnitudes_topk_keeps_the_first() -> None:
    vector = np.zeros(2 * CHUNK, np.float32)
    vector[5:CHUNK:2] = 1
    vector[CHUNK + 7 :: 3] = -1
    vector[CHUNK + 4000] = 2
    got = sent(vector)
    assert np.array_equal(np.flatnonzero(got[:CHUNK]), 5 + 2 * np.arange(64))
    assert np.array_equal(np.flatnonzero(got[CHUNK:]), [*(7 + 3 * np.arange(63)), 4000])


def test_topk_says_the_same_bytes_twice() -> None:
    few = np.random.default_rng(1).integers(-2, 3, GRADIENT.size).astype(np.float32)  # ties everywhere
    for vector in (GRADIENT, few):
        assert TOPK.encode(vector, 1) == TOPK.encode(vector.copy(), 2)


def test_topk_sends_a_hundredth_of_the_bytes() -> None:
    vector = np.random.default_rng(2).normal(size=1 << 18).astype(np.float32)
    assert len(TOPK.encode(vector)) < vector.nbytes / 100


def forged(levels: list[int], low: list[int], high: list[int]) -> bytes:
    """A well-formed blob of 128 values, of which two are kept, with true checksums."""
    parts = (struct.pack("<f", 1.0), bytes(level % 256 for level in levels), bytes(low), bytes(high))
    return b"".join(struct.pack("<I3sBI", 8 + len(part), b"CSF", 0, zlib.crc32(part)) + part for part in parts)


def test_forged_positions_and_levels_of_topk_are_refused() -> None:
    assert np.flatnonzero(TOPK.decode(forged([7, -7], [0, 126], [0, 0]), 128)).tolist() == [0, 127]
    for levels, low, high in (
        ([7, -7], [0, 127], [0, 0]),
        ([7, -7], [128, 0], [0, 0]),
        ([7, -7], [0, 0], [0, 1]),
        ([7, -7], [255, 255], [255, 255]),
        ([8, 0], [0, 0], [0, 0]),
        ([0, -8], [0, 0], [0, 0]),
        ([-128, 0], [0, 0], [0, 0]),
    ):
        with pytest.raises(CodecError, match="beyond"):
            TOPK.decode(forged(levels, low, high), 128)
    with pytest.raises(CodecError, match="wrong length"):
        TOPK.decode(forged([1], [0], [0]), 128)


def test_with_feedback_the_sum_of_what_topk_sends_follows_the_sum_of_the_values_and_without_it_does_not() -> None:
    rng = np.random.default_rng(3)
    steady = (rng.normal(size=GRADIENT.size) * 1e-3).astype(np.float32)
    feedback, alone, fed, total = Feedback([TOPK], (GRADIENT.size,)), *np.zeros((3, GRADIENT.size))
    for _ in range(300):
        values = steady + (rng.normal(size=steady.size) * 1e-4).astype(np.float32)
        total += values
        alone += sent(values)
        fed += TOPK.decode(feedback.encode(0, values), values.size)
    assert np.linalg.norm(fed - total) < 0.2 * np.linalg.norm(total)
    assert np.linalg.norm(alone - total) > 0.6 * np.linalg.norm(total)


@pytest.mark.parametrize("codec", [TOPK, INT8, CODECS["bfloat16"]], ids=["topk", "int8", "bfloat16"])
def test_what_was_not_sent_is_owed_to_the_last_bit_bucket_by_bucket(codec: TopK) -> None:
    sizes = (5000, 5000, 2988)
    feedback, buckets = Feedback([codec] * len(sizes), sizes), np.split(GRADIENT, np.cumsum(sizes)[:-1])
    owed = [np.zeros(size, np.float32) for size in sizes]
    for seed in range(3):
        for number, values in enumerate(buckets):
            due = owed[number] + values
            blob = feedback.encode(number, values, seed)
            assert blob == codec.encode(due, seed)
            owed[number] = due - codec.decode(blob, values.size)
            assert feedback.residual(number).tobytes() == owed[number].tobytes() and owed[number].any()


def test_values_that_are_not_finite_are_sent_once_and_not_owed() -> None:
    feedback, bad = Feedback([TOPK], (GRADIENT.size,)), GRADIENT.copy()
    bad[9] = np.nan
    assert not np.isfinite(TOPK.decode(feedback.encode(0, bad), bad.size)).all()
    assert feedback.encode(0, GRADIENT) == TOPK.encode(GRADIENT)


def test_feedback_keeps_one_vector_and_one_bucket() -> None:
    feedback = Feedback([TOPK, TOPK], (CHUNK, CHUNK))
    before = feedback.residual(1).__array_interface__["data"]
    feedback.encode(1, GRADIENT[:CHUNK])
    assert feedback.residual(1).__array_interface__["data"] == before and not feedback.residual(0).any()


def test_a_plane_that_does_not_shrink_travels_raw_beside_one_that_does() -> None:
    blob = CODECS["float16"].encode(np.random.default_rng(4).normal(size=100_000).astype(np.float32))
    upper, lower = frame.split(blob, 2)
    assert upper[3] == 1 and lower[3] == 0
