"""The low-rank codec: what it keeps of a matrix, and that every receiver decodes the same bits."""

import struct
import tracemalloc
import zlib

import numpy as np
import pytest
import torch

from computeshare.codecs.feedback import Feedback
from computeshare.codecs.half_precision import Halves
from computeshare.codecs.lowrank import LEVELS, MOST_SHIFT, LowRank
from computeshare.codecs.messages import decode_update, encode_update, fitted
from computeshare.errors import CodecError
from computeshare.tensors.layout import BUCKET, Layout, Piece
from computeshare.types import Vector

ROWS, COLUMNS = 60, 90
PIECES = (Piece(COLUMNS, 0, ROWS * COLUMNS), Piece(1, 0, 30))
RNG = np.random.default_rng(0)


def product(rank: int, rows: int = ROWS, columns: int = COLUMNS, decay: float = 1.0) -> Vector:
    """A matrix of this rank, its singular values falling by `decay`, flattened."""
    left, right = (np.linalg.qr(RNG.normal(size=(size, rank)))[0] for size in (rows, columns))
    return ((left * decay ** np.arange(rank)) @ right.T).astype(np.float32).ravel()


def bucket(matrix: Vector) -> Vector:
    return np.concatenate((matrix, np.linspace(-1, 1, 30, dtype=np.float32)))


def sent(values: Vector, rank: int, seed: int = 0) -> Vector:
    codec = LowRank(rank).fitted(PIECES)
    return codec.decode(codec.encode(values, seed), values.size)


def lost(values: Vector, back: Vector) -> float:
    wide = values.astype(np.float64)
    return float(np.linalg.norm(back - wide) / np.linalg.norm(wide))


@pytest.mark.parametrize("rank", [1, 2, 4, 8])
def test_a_matrix_of_low_rank_arrives_but_for_the_rounding_of_its_factors(rank: int) -> None:
    values = bucket(product(rank, decay=0.7))
    back = sent(values, rank)
    assert lost(values[:-30], back[:-30]) < 0.02
    assert np.array_equal(back[-30:], values[-30:].astype(np.float16))


@pytest.mark.parametrize("rank", [1, 2, 4, 8])
def test_of_another_matrix_nearly_the_best_approximation_arrives(rank: int) -> None:
    values = bucket(product(ROWS, decay=0.8))
    singular = np.linalg.svd(values[:-30].reshape(ROWS, COLUMNS), compute_uv=False)
    best = np.linalg.norm(singular[rank:]) / np.linalg.norm(singular)
    found = np.mean([lost(values[:-30], sent(values, rank, seed)[:-30]) for seed in range(20)])
    assert best < found < 1.25 * best


def test_the_start_follows_from_the_seed_alone() -> None:
    values, codec = bucket(RNG.normal(size=ROWS * COLUMNS).astype(np.float32)), LowRank(2).fitted(PIECES)
    assert codec.encode(values, 1) == codec.encode(values.copy(), 1) != codec.encode(values, 2)


def test_the_bits_do_not_depend_on_where_the_values_lie_in_memory() -> None:
    values, codec = bucket(RNG.normal(size=ROWS * COLUMNS).astype(np.float32)), LowRank(4).fitted(PIECES)
    for offset in range(1, 17):
        around = np.zeros(values.size + offset, np.float32)
        around[offset:] = values
        around.flags.writeable = False
        assert codec.encode(around[offset:], 5) == codec.encode(values, 5)


def test_a_factor_takes_a_byte_per_value_and_small_tensors_travel_as_they_are() -> None:
    few = (*PIECES, Piece(9, 0, 8 * 9))  # of rank 8 its factors would have twice as many values
    values = RNG.normal(size=ROWS * COLUMNS + 30 + 8 * 9).astype(np.float32)
    codec = LowRank(8).fitted(few)
    blob = codec.encode(values, compress=False)
    assert len(blob) <= 4 + 8 + 8 * (ROWS + COLUMNS) + 2 * (30 + 72) + 32
    assert np.array_equal(codec.decode(blob, values.size)[-102:], values[-102:].astype(np.float16))


def test_a_tensor_in_several_buckets_is_cut_into_rows_and_pieces_of_rows() -> None:
    layout = Layout.build(
        iter([("v", (5,), "parameter"), ("w", (2400, 50, 36), "parameter"), ("b", (7,), "parameter")])
    )
    assert len(layout.buckets) == 5
    assert layout.pieces[0] == (Piece(1, 0, 5), Piece(1800, 0, BUCKET - 5))
    assert layout.pieces[1] == (Piece(1800, BUCKET - 5, 2 * BUCKET - 5),)
    values = np.concatenate((np.zeros(5), product(4, 2400, 1800), np.ones(7))).astype(np.float32)
    message = encode_update(LowRank(4), values, np.zeros(0, np.float32), layout, 3)
    assert sum(map(len, message)) < values.nbytes / 100
    out = np.full_like(values, np.nan)
    back, _ = decode_update(LowRank(4), message, layout, out)
    assert back is out and lost(values, back) < 0.02


def forged(scale: float, shifts: bytes, levels: bytes, others: int = 30) -> bytes:
    """A blob of `PIECES` with true checksums."""
    factors = struct.pack("<f", scale) + shifts + levels
    parts = (
        b"CSF\0" + struct.pack("<I", zlib.crc32(factors)) + factors,
        Halves("float16").encode(np.ones(others, np.float32)),
    )
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


@pytest.mark.parametrize("size", [0.37, 2.0**-9, 2.0**-110, 2.0**90])
def test_the_wire_format_is_pinned_and_decoding_is_exact_in_any_order_of_sums(size: float) -> None:
    """The largest levels and shifts of all signs: float64 has room for any sum of them, and float32 as well."""
    rank, rng = 8, np.random.default_rng(1)
    codec = LowRank(rank).fitted(PIECES)
    for most in (LEVELS, 1):  # all as large as they may be, then small ones beside large ones
        levels = rng.choice((-LEVELS, LEVELS, most), size=(ROWS + COLUMNS, rank)).astype(np.int8)
        levels[0] = levels[ROWS] = LEVELS
        both = levels[:ROWS].T.tobytes() + levels[ROWS:].T.tobytes()
        shifts = rng.integers(0, MOST_SHIFT + 1, rank).astype(np.uint8)
        scale = np.float32(size)
        back = codec.decode(forged(scale, shifts.tobytes(), both), ROWS * COLUMNS + 30)
        whole = levels[:ROWS].astype(np.float64) @ np.ldexp(levels[ROWS:].astype(np.float64), -shifts.astype(int)).T
        assert np.array_equal(whole, whole.astype(np.float32))  # none was rounded
        assert back[:-30].tobytes() == (whole.astype(np.float32) * scale).tobytes()
        reverse, terms = np.zeros((ROWS, COLUMNS), np.float32), levels.astype(np.float32)
        for k in reversed(range(rank)):
            reverse += np.outer(terms[:ROWS, k], np.ldexp(terms[ROWS:, k], -int(shifts[k])))
        assert back[:-30].tobytes() == (reverse * scale).tobytes()


@pytest.mark.parametrize("size", [1e-20, 0.3, 0.5, 1.0, 700.0])
def test_a_scale_is_a_power_of_two_and_the_levels_fill_their_range(size: float) -> None:
    codec = LowRank(4).fitted(PIECES)
    blob = codec.encode((size * bucket(product(ROWS))).astype(np.float32), compress=False)
    scale, *_ = struct.unpack_from("<f", blob, 4 + 8)
    levels = np.frombuffer(blob, np.int8, 4 * (ROWS + COLUMNS), 4 + 8 + 4 + 4).astype(int)
    assert np.frexp(np.float32(scale))[0] == 0.5
    assert abs(levels[: 4 * ROWS].reshape(4, -1)).max(1).tolist() == [LEVELS] * 4
    assert (abs(levels[4 * ROWS :].reshape(4, -1)).max(1) > LEVELS // 2).all()


@pytest.mark.parametrize("threads", [1, 2])
def test_what_was_encoded_is_decoded_to_the_same_bits_by_any_number_of_threads(threads: int) -> None:
    values, before = bucket(product(ROWS)), torch.get_num_threads()
    codec = LowRank(4).fitted(PIECES)
    blob = codec.encode(values)
    expected = codec.decode(blob, values.size).tobytes()
    torch.set_num_threads(threads)
    try:
        assert codec.decode(blob, values.size).tobytes() == expected
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("shifts", "levels", "others"),
    [
        (bytes([MOST_SHIFT + 1]), bytes(ROWS + COLUMNS), 30),
        (bytes(1), bytes([128] * (ROWS + COLUMNS)), 30),
        (bytes(1), bytes(ROWS + COLUMNS + 1), 30),
        (bytes(1), bytes(ROWS + COLUMNS - 1), 30),
        (bytes(1), bytes(ROWS + COLUMNS), 31),
        (bytes(1), bytes(ROWS + COLUMNS), 0),
    ],
)
def test_a_forged_blob_is_refused(shifts: bytes, levels: bytes, others: int) -> None:
    codec, size = LowRank(1).fitted(PIECES), ROWS * COLUMNS + 30
    assert not codec.decode(forged(1.0, bytes(1), bytes(ROWS + COLUMNS)), size)[:-30].any()
    with pytest.raises(CodecError, match=r"none of this codec's|wrong length"):
        codec.decode(forged(1.0, shifts, levels, others), size)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_a_matrix_that_is_not_finite_decodes_to_no_number_and_nothing_is_owed(bad: float) -> None:
    values = bucket(product(2))
    values[[17, 18]] = bad
    back = sent(values, 2)
    assert np.isnan(back[:-30]).all() and np.isfinite(back[-30:]).all()
    codec = LowRank(2).fitted(PIECES)
    feedback = Feedback([codec], (values.size,))
    feedback.encode(0, values)
    assert not feedback.residual(0).any()


@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-30, 1e30])
def test_matrices_of_any_size_arrive_and_the_smallest_as_zeros(size: float) -> None:
    values = (size * product(1)).astype(np.float32)
    back = sent(bucket(values), 4)[:-30]
    assert np.isfinite(back).all() and (not back.any() if size < 1e-37 else lost(values, back) < 0.02)


def test_decoding_takes_no_more_memory_than_the_bucket_has() -> None:
    layout = Layout.build(iter([("w", (2800, 1500), "parameter")]))
    (codec, *_), size = fitted(LowRank(4), layout), layout.bucket_sizes[0]
    blob, out = codec.encode(RNG.normal(size=size).astype(np.float32)), np.empty(size, np.float32)
    tracemalloc.start()
    codec.decode(blob, size, out)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak <= out.nbytes / 10


def test_with_feedback_the_sum_of_what_is_sent_follows_the_sum_of_the_values_and_without_it_does_not() -> None:
    rng, steady = np.random.default_rng(3), bucket(product(ROWS, decay=0.95))
    codec = LowRank(4).fitted(PIECES)
    feedback, alone, fed, total = Feedback([codec], (steady.size,)), *np.zeros((3, steady.size))
    for seed in range(100):
        values = steady + (rng.normal(size=steady.size) * 1e-3).astype(np.float32)
        total += values
        alone += codec.decode(codec.encode(values, seed), values.size)
        fed += codec.decode(feedback.encode(0, values, seed), values.size)
    assert np.linalg.norm(fed - total) < 0.1 * np.linalg.norm(total)
    assert np.linalg.norm(alone - total) > 0.5 * np.linalg.norm(total)
