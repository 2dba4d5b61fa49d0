"""Values between stages arrive as they were, and what is no message is refused before memory is taken for it."""

import json
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from computeshare.codecs import frame
from computeshare.codecs.registry import CODECS, EXACT
from computeshare.errors import CodecError, SpecError
from computeshare.pipeline.frames import DTYPES, decode, encode, form_bytes, form_of, passed, tensors_of

LIMIT = 1 << 20
DRAW = torch.Generator().manual_seed(0)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=DRAW)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        is_like = one.dtype == other.dtype and one.shape == other.shape and one.requires_grad == other.requires_grad
        return is_like and one.detach().contiguous().numpy(force=True).tobytes() == other.detach().contiguous().numpy(
            force=True
        ).tobytes() if one.dtype != torch.bfloat16 else is_like and bool((one == other).all())  # fmt: skip
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    return type(one) is type(other) and bool(one == other)


VALUES: list[Any] = [
    drawn(3, 4),
    drawn(2, 3, 5, 7).contiguous(memory_format=torch.channels_last),
    drawn(6, 4).t(),
    drawn(8, 8)[::2, 1::3],
    drawn(5).expand(3, 5),
    torch.zeros(0, 3),
    torch.tensor(2.5, requires_grad=True),
    drawn(4, 4).requires_grad_(),
    [drawn(2), None, 7, 0.1, True, "text", (drawn(1, 1), {"a": drawn(2, 2), "b": 1})],
    *(torch.tensor([[0, 1], [1, 0]]).to(dtype) for dtype in DTYPES.values()),
]


def test_every_kind_of_value_comes_back_to_the_bit() -> None:
    assert same(decode(encode(VALUES, EXACT), EXACT, LIMIT), VALUES)
    assert decode(encode([], EXACT), EXACT, 0) == []


@pytest.mark.parametrize("codec", ["float32", "bfloat16", "int8"])
def test_what_stays_in_the_worker_is_what_would_have_come_over_the_wire(codec: str) -> None:
    sent, kept = decode(encode(VALUES, CODECS[codec], 5), CODECS[codec], LIMIT), passed(VALUES, CODECS[codec], 5)
    assert same(sent, kept)
    for one, other in zip(tensors_of(sent), tensors_of(kept), strict=True):
        assert one.stride() == other.stride() and one.is_leaf and other.is_leaf


def test_the_order_of_dimensions_in_memory_travels() -> None:
    images = drawn(2, 3, 5, 7).contiguous(memory_format=torch.channels_last)
    (found,) = decode(encode([images], EXACT), EXACT, LIMIT)
    assert found.is_contiguous(memory_format=torch.channels_last) and torch.equal(found, images)


@pytest.mark.parametrize(("codec", "most"), [("bfloat16", 2**-8), ("int8", 1 / 120)])
def test_a_lossy_codec_rounds_float32_and_nothing_else(codec: str, most: float) -> None:
    floats, numbers, doubles = drawn(40, 30), torch.arange(50), drawn(9).double()
    message = encode([floats, numbers, doubles], CODECS[codec], seed=3)
    found = decode(message, CODECS[codec], LIMIT)
    assert torch.equal(found[1], numbers) and torch.equal(found[2], doubles)
    apart = (found[0] - floats).abs().max() / floats.abs().max()
    assert 0 < apart < most
    assert len(message) < len(encode([floats, numbers, doubles], EXACT)) / (1.7 if codec == "bfloat16" else 2.5)
    assert message == encode([floats, numbers, doubles], CODECS[codec], seed=3)


def test_a_tensor_passed_on_within_a_worker_takes_no_new_memory() -> None:
    tensor = drawn(3, 4)
    (found,) = passed([tensor], EXACT)
    assert found.data_ptr() == tensor.data_ptr()
    assert passed([tensor[1:]], EXACT)[0].data_ptr() != tensor[1:].data_ptr()  # as aligned as one from the wire


def test_values_of_other_kinds_do_not_travel() -> None:
    with pytest.raises(SpecError, match=r"a object crosses .*strategy.split"):
        encode([object()], EXACT)
    deep: Any = 1
    for _ in range(40):
        deep = [deep]
    with pytest.raises(SpecError, match="nested too deep"):
        encode([deep], EXACT)


def with_header(header: Any, *bodies: bytes) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return frame.join([frame.pack(raw, compress=False), *bodies])


BODY = frame.pack(np.zeros(4, np.float32))
GOOD = ["float32", [2, 2], [0, 1], False]
HOSTILE = {
    "no JSON": with_header(b"\xff{"),
    "deep JSON": with_header(b"[" * 30_000),
    "long number": with_header(b"9" * 9_000),
    "not an object": with_header([1]),
    "no tensors": with_header({"values": []}),
    "not a list": with_header({"values": 3, "tensors": []}),
    "a tensor that is not there": with_header({"values": [{"tensor": 1}], "tensors": [GOOD]}, BODY),
    "a negative number": with_header({"values": [{"tensor": -1}], "tensors": [GOOD]}, BODY),
    "an unknown kind": with_header({"values": [{"pickle": "x"}], "tensors": []}),
    "two kinds": with_header({"values": [{"tensor": 0, "tuple": []}], "tensors": [GOOD]}, BODY),
    "an unknown type": with_header({"values": [], "tensors": [["object", [1], [0], False]]}, BODY),
    "a type that is none": with_header({"values": [], "tensors": [[["float32"], [1], [0], False]]}, BODY),
    "a huge shape": with_header({"values": [], "tensors": [["float32", [2**39, 2**39], [0, 1], False]]}, BODY),
    "a shape over the limit": with_header({"values": [], "tensors": [["uint8", [LIMIT + 1], [0], False]]}, BODY),
    "many small ones": with_header({"values": [], "tensors": [["uint8", [LIMIT // 2], [0], False]] * 3}, BODY, BODY),
    "a negative shape": with_header({"values": [], "tensors": [["float32", [-2, -2], [0, 1], False]]}, BODY),
    "a shape of fractions": with_header({"values": [], "tensors": [["float32", [2.0, 2], [0, 1], False]]}, BODY),
    "true as a size": with_header({"values": [], "tensors": [["float32", [True, 4], [0, 1], False]]}, BODY),
    "a wrong order": with_header({"values": [], "tensors": [["float32", [2, 2], [1, 1], False]]}, BODY),
    "many dimensions": with_header({"values": [], "tensors": [["float32", [1] * 99, [*range(99)], False]]}, BODY),
    "many tensors": with_header({"values": [], "tensors": [["uint8", [0], [0], False]] * 2000}),
    "gradients of numbers": with_header({"values": [], "tensors": [["int64", [1], [0], True]]}, BODY),
    "a missing body": with_header({"values": [], "tensors": [GOOD]}),
    "one body more": with_header({"values": [], "tensors": [GOOD]}, BODY, BODY),
    "a short body": with_header({"values": [], "tensors": [GOOD]}, BODY[:-4]),
    "a damaged body": with_header({"values": [], "tensors": [GOOD]}, BODY[:-1] + b"\x01"),
    "another shape": with_header({"values": [], "tensors": [["float32", [2, 3], [0, 1], False]]}, BODY),
    "a bomb": with_header({"values": [], "tensors": [GOOD]}, frame.pack(np.zeros(10**6, np.float32))),
    "a header's length that lies": b"\xff\xff\xff\xff" + BODY,
    "nested too deep": with_header({"values": json.loads("[" * 17 + "]" * 17), "tensors": []}),
    "a short length": b"\x01\x00\x00\x00" + BODY,
    "nothing": b"",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_message_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    allocated: list[int] = []
    empty = torch.empty

    def counted(*sizes: Any, **options: Any) -> Tensor:
        allocated.append(math.prod(sizes[0] if isinstance(sizes[0], tuple | list) else sizes))
        return empty(*sizes, **options)

    monkeypatch.setattr(torch, "empty", counted)
    with pytest.raises(CodecError):
        decode(HOSTILE[name], EXACT, LIMIT)
    assert sum(allocated) <= LIMIT


@pytest.mark.parametrize("codec", ["float32", "bfloat16", "int8"])
def test_damaged_messages_are_refused_or_change_no_more_than_values(codec: str) -> None:
    """Any bytes lead to a `CodecError` or to values; never to another error."""
    draw = random.Random(7)
    whole = encode([drawn(40, 30), torch.arange(9), (drawn(3, 3), None, {"a": 1})], CODECS[codec])
    refused = 0
    for _ in range(400):
        message = bytearray(whole)
        for _ in range(draw.randint(1, 3)):
            place = draw.randrange(min(len(message), draw.choice((40, 300, len(message)))))
            match draw.randrange(4):
                case 0:
                    message[place] = draw.randrange(256)
                case 1:
                    del message[place : place + draw.randint(1, 50)]
                case 2:
                    message[place:place] = draw.randbytes(draw.randint(1, 50))
                case _:
                    message = message[: place + 1]
        try:
            decode(message, CODECS[codec], LIMIT)
        except CodecError:
            refused += 1
        else:
            assert message == whole
    assert refused > 300


def test_what_can_be_read_can_be_written_and_has_a_form() -> None:
    values = [drawn(2), (1, {"a": [None, drawn(3, 3)]})]
    for _ in range(20):
        values = [values]
        try:
            message = encode(values, EXACT)
        except SpecError:
            break
        assert form_of(decode(message, EXACT, LIMIT)) == form_of(values)
        assert form_bytes(form_of(values)) == 44
    else:
        pytest.fail("there is no end to nesting")
