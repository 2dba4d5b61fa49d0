"""Codecs and messages: what is sent arrives, what is damaged is refused, and the wire format stays as it is."""

import hashlib
import tracemalloc
import zlib
from dataclasses import replace

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from computeshare.codecs import frame
from computeshare.codecs.messages import (
    decode_some,
    decode_update,
    decode_weights,
    encode_update,
    encode_weights,
    largest_update,
    update_parts,
    weights_parts,
)
from computeshare.codecs.registry import CODECS, EXACT
from computeshare.errors import CodecError
from computeshare.tensors.layout import BUCKET, Layout, Weights
from computeshare.types import Vector

GRADIENT = np.random.default_rng(0).normal(0, 1e-3, 5000).astype(np.float32)
LAYOUT = Layout.build(
    iter([("w", (3, 4), "parameter"), ("mean", (4,), "buffer"), ("seen", (), "counter"), ("b", (4,), "parameter")])
)
GOLDEN = {
    "float32": "43534600edc10830000000bf0000c0be000080be000000be000000000000003e0000803e0000c03e",
    "float16": "100000004353460068b2f3e2b8b6b4b000303436100000004353460069df22650000000000000000",
    "bfloat16": "1000000043534600a325d83bbfbebebe003e3e3e1000000043534600c10e681700c08000000080c0",
    "int8": "4353460094dc70b64702813b81a1c0e00020405f",
    "topk": "0c00000043534600d692fcd22549923d090000004353460035a56316f9"
    "09000000435346008def02d20009000000435346008def02d200",
}
GOLDEN["int4"] = "0c00000043534600eca3a4e8ae49923d0c0000004353460087464418b9ec2054"
GOLDEN |= {f"lowrank{rank}": "080000004353460000000000" + "28000000" + GOLDEN["float16"] for rank in (1, 2, 4, 8)}


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
@given(vector=arrays.arrays(np.float32, st.integers(0, 300), elements=st.integers(-256, 256).map(float)))
def test_values_that_the_codec_can_hold_come_back_as_they_were(name: str, vector: Vector) -> None:
    codec = CODECS[name]
    assert np.array_equal(codec.decode(codec.encode(vector), len(vector)), vector)


@pytest.mark.parametrize("name", CODECS)
def test_the_wire_format_is_pinned(name: str) -> None:
    vector = (np.arange(8, dtype=np.float32) - 4) / 8
    assert CODECS[name].encode(vector).hex() == GOLDEN[name]


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 4097, 70_000])
def test_a_vector_of_any_length_is_decoded_into_a_buffer_of_its_own_or_a_given_one(name: str, size: int) -> None:
    codec = CODECS[name]
    vector = np.random.default_rng(size).normal(size=size).astype(np.float32)
    blob, out = codec.encode(vector, 7), np.full(size, np.nan, np.float32)
    assert codec.decode(blob, size, out) is out
    assert out.tobytes() == codec.decode(blob, size).tobytes()
    if not codec.residual:
        assert np.abs(out - vector).max(initial=0) <= np.abs(vector).max(initial=0) / (6 if name == "int4" else 126)


@pytest.mark.parametrize("name", CODECS)
def test_a_bucket_has_the_same_bits_wherever_it_lies(name: str) -> None:
    codec, around = CODECS[name], np.zeros(5003, np.float32)
    around[3:] = GRADIENT
    around.flags.writeable = False
    assert codec.encode(around[3:], 5) == codec.encode(GRADIENT.copy(), 5)


@pytest.mark.parametrize("name", CODECS)
def test_a_value_that_is_not_finite_reaches_the_receiver_as_such(name: str) -> None:
    for bad in (np.nan, np.inf, -np.inf):
        for where in (0, 4500):
            vector = GRADIENT.copy()
            vector[where] = bad
            assert not np.isfinite(CODECS[name].decode(CODECS[name].encode(vector), vector.size)).all()


def test_decoding_takes_no_more_memory_than_the_bucket_has() -> None:
    vector = np.random.default_rng(0).normal(size=1_000_000).astype(np.float32)
    out = np.empty_like(vector)
    for name, codec in CODECS.items():
        blob = codec.encode(vector)
        tracemalloc.start()
        codec.decode(blob, vector.size, out)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak <= vector.nbytes, name


def test_exact_codecs_keep_every_bit() -> None:
    codec = CODECS["float32"]
    assert codec.exact and codec.decode(codec.encode(GRADIENT), GRADIENT.size).tobytes() == GRADIENT.tobytes()


@given(vector=arrays.arrays(np.float32, st.integers(0, 300), elements=st.floats(width=32)))
def test_float16_rounds_as_ieee_754_says_subnormals_and_infinities_included(vector: Vector) -> None:
    codec = CODECS["float16"]
    with np.errstate(over="ignore", invalid="ignore"):
        expected = vector.astype(np.float16).astype(np.float32)
    assert np.array_equal(codec.decode(codec.encode(vector), len(vector)), expected, equal_nan=True)


def test_float16_is_within_half_a_unit_in_the_last_place() -> None:
    codec = CODECS["float16"]
    error = np.abs(codec.decode(codec.encode(GRADIENT), GRADIENT.size) - GRADIENT)
    assert not codec.exact and (error <= np.maximum(2.0**-11 * np.abs(GRADIENT), 2.0**-25)).all()


@given(vector=arrays.arrays(np.float32, st.integers(0, 300), elements=st.floats(width=32, allow_nan=False)))
def test_bfloat16_is_within_half_a_unit_in_the_last_place(vector: Vector) -> None:
    codec = CODECS["bfloat16"]
    with np.errstate(over="ignore", invalid="ignore"):
        got = codec.decode(codec.encode(vector), len(vector))
        near = np.abs(got - vector) <= np.maximum(2.0**-8 * np.abs(vector.astype(np.float64)), 2.0**-134)
    assert (near | (got == vector) | (np.abs(vector) > 3.38e38)).all()


@pytest.mark.parametrize("name", CODECS)
@given(st.data())
def test_a_damaged_blob_is_refused(name: str, data: st.DataObject) -> None:
    codec = CODECS[name]
    blob = bytearray(codec.encode(GRADIENT[:200]))
    where = data.draw(st.integers(0, len(blob) - 1))
    blob[where] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CodecError):
        codec.decode(bytes(blob), 200)


@pytest.mark.parametrize("name", CODECS)
@given(garbage=st.binary(max_size=400))
def test_garbage_is_refused(name: str, garbage: bytes) -> None:
    with pytest.raises(CodecError):
        CODECS[name].decode(garbage, 100)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("size", [0, 100, 301])
def test_another_length_than_expected_is_refused(name: str, size: int) -> None:
    with pytest.raises(CodecError, match="wrong length"):
        CODECS[name].decode(CODECS[name].encode(GRADIENT[:200]), size)


@pytest.mark.parametrize("states_size", [True, False])
def test_a_compression_bomb_is_refused_before_it_is_inflated(states_size: bool) -> None:
    compressor = zstandard.ZstdCompressor(level=19, write_content_size=states_size)
    bomb = compressor.compress(bytes(200_000_000))
    blob = b"CSF\x01" + zlib.crc32(bomb).to_bytes(4, "little") + bomb
    with pytest.raises(CodecError, match="wrong length"):
        frame.unpack(blob, 1_000_000)


def test_bytes_after_the_compressed_frame_are_refused() -> None:
    body = zstandard.ZstdCompressor().compress(bytes(1000)) + b"more"
    with pytest.raises(CodecError, match="damaged compression"):
        frame.unpack(b"CSF\x01" + zlib.crc32(body).to_bytes(4, "little") + body, 1000)


@pytest.mark.parametrize("name", sorted(CODECS))
def test_what_is_not_compressed_is_longer_and_decodes_to_the_same_bits(name: str) -> None:
    codec, vector = CODECS[name], np.repeat(GRADIENT, 4)
    short, long = codec.encode(vector, 5), codec.encode(vector, 5, compress=False)
    assert len(long) >= len(short) and len(codec.encode(np.zeros(9999, np.float32), compress=False)) > 200
    assert codec.decode(long, vector.size).tobytes() == codec.decode(short, vector.size).tobytes()


def test_compression_is_left_out_where_it_does_not_win() -> None:
    noise = np.random.default_rng(1).bytes(10_000)
    assert len(frame.pack(noise)) == len(noise) + 8
    assert len(frame.pack(bytes(10_000))) < 100


def test_an_update_carries_gradient_and_buffers() -> None:
    vector, buffers = np.arange(16, dtype=np.float32), np.ones(4, np.float32)
    message = encode_update(CODECS["float16"], vector, buffers, LAYOUT, 0)
    got = decode_update(CODECS["float16"], message, LAYOUT)
    assert np.array_equal(got[0], vector) and np.array_equal(got[1], buffers)


def test_a_message_that_lacks_a_part_or_has_another_is_refused() -> None:
    message = encode_update(CODECS["float32"], np.arange(16, dtype=np.float32), np.ones(4, np.float32), LAYOUT, 0)
    with pytest.raises(CodecError, match="truncated: part 1 of 2 is missing"):
        decode_update(CODECS["float32"], [message[0], None], LAYOUT)
    for other in (message[:1], [*message, b"x"]):
        with pytest.raises(CodecError, match=r"wrong length: a message of \d parts where 2 are expected"):
            decode_update(CODECS["float32"], other, LAYOUT)


def test_a_vector_travels_in_buckets_and_arrives_whole() -> None:
    layout = Layout.build(iter([("w", (4 * BUCKET + 3,), "parameter")]))
    vector, none = np.arange(layout.parameters, dtype=np.float32), np.zeros(0, np.float32)
    message = encode_update(CODECS["float32"], vector, none, layout, 0)
    assert len(message) == update_parts(layout) == 6
    assert np.array_equal(decode_update(CODECS["float32"], message, layout)[0], vector)
    kept = np.empty_like(vector)
    assert decode_update(CODECS["float32"], message, layout, kept)[0] is kept and np.array_equal(kept, vector)
    assert sum(map(len, message)) <= largest_update(layout)


def test_weights_carry_buffers_and_counters_exactly_and_their_digest_follows_the_state_dict() -> None:
    weights = Weights(
        np.linspace(0, 1, 16, dtype=np.float32), np.full(4, 1 / 3, np.float32), np.array([2**40 + 1], np.int64)
    )
    got = decode_weights(CODECS["float32"], [*encode_weights(CODECS["float32"], weights, LAYOUT)], LAYOUT)
    assert LAYOUT.digest(got) == LAYOUT.digest(weights)
    room = np.zeros(LAYOUT.parameters, np.float32)
    there = decode_weights(CODECS["float32"], [*encode_weights(CODECS["float32"], weights, LAYOUT)], LAYOUT, room)
    assert there.parameters is room and LAYOUT.digest(there) == LAYOUT.digest(weights)
    w, b = weights.parameters[:12], weights.parameters[12:]
    in_order = w.tobytes() + weights.buffers.tobytes() + weights.counters.tobytes() + b.tobytes()
    assert LAYOUT.digest(weights) == hashlib.sha256(in_order).hexdigest()


def test_buckets_of_a_version_are_checked_by_their_own_digests() -> None:
    layout = replace(Layout.build(iter([("w", (30,), "parameter"), ("m", (2,), "buffer")])), cuts=(10, 20))
    weights = Weights(np.arange(30, dtype=np.float32), np.float32([1, 2]), np.zeros(0, np.int64))
    message = [*encode_weights(CODECS["float32"], weights, layout)]
    assert len(message) == weights_parts(layout) == 3 + 2 + 1
    assert np.array_equal(decode_weights(CODECS["float32"], message, layout).parameters, weights.parameters)
    some = [message[1], *message[3:]]
    values, buffers, counters = decode_some(CODECS["float32"], some, [1], layout)
    assert values[1].tolist() == [*range(10, 20)] and buffers.tolist() == [1, 2] and not len(counters)
    other = CODECS["float32"].encode(weights.parameters[:10])
    for wrong in ([other, *message[3:]], [message[1], EXACT.encode(np.float32([3, 4])), *message[4:]]):
        with pytest.raises(CodecError, match="digest mismatch"):
            decode_some(CODECS["float32"], wrong, [1], layout)
    with pytest.raises(CodecError, match="truncated"):
        decode_some(CODECS["float32"], [None, *message[3:]], [1], layout)
