"""Files of tensors, as the library that everybody has reads them."""

import json
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from computeshare.tensors import safetensors_writer

TENSORS: dict[str, Any] = {
    "flag": np.array([True, False, True]),
    "weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "step": np.array(7.0, np.float32),
    "count": np.array([1, -2], np.int64),
    "turned": np.arange(6, dtype=np.float64).reshape(2, 3).T,
    "empty": np.zeros((0, 5), np.float32),
}


def test_what_is_written_is_what_the_library_reads() -> None:
    found = load(b"".join(safetensors_writer.pieces(TENSORS, {"about": "ä"})))
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert np.array_equal(found[name], tensor)


def test_the_header_holds_the_metadata_and_every_tensor_lies_aligned() -> None:
    header, *_ = safetensors_writer.pieces(TENSORS, {"about": "ä", "order": "[]"})
    assert len(header) % 8 == 0
    told = json.loads(bytes(header[8:]))
    assert told.pop("__metadata__") == {"about": "ä", "order": "[]"}
    for name, entry in told.items():
        assert entry["data_offsets"][0] % TENSORS[name].itemsize == 0


def test_the_bytes_do_not_depend_on_the_order_and_contiguous_tensors_are_not_copied() -> None:
    pieces = safetensors_writer.pieces(TENSORS, {})
    assert pieces == safetensors_writer.pieces(dict(reversed(TENSORS.items())), {})
    copied = {name for name, tensor in TENSORS.items() if not any(np.shares_memory(tensor, p) for p in pieces[1:])}
    assert copied == {"turned", "empty"}


def test_what_is_read_is_what_was_written_and_lies_in_the_file() -> None:
    file = bytearray(b"".join(safetensors_writer.pieces(TENSORS, {"about": "ä"})))
    found, metadata = safetensors_writer.read(file)
    assert metadata == {"about": "ä"} and found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and np.array_equal(found[name], tensor)
        assert not tensor.size or (found[name].flags.writeable and np.shares_memory(found[name], np.asarray(file)))


FILE = b"".join(safetensors_writer.pieces({"w": np.arange(4, dtype=np.float32)}, {"about": "it"}))
DAMAGES = {
    "empty": b"",
    "cut in its length": FILE[:7],
    "cut in its header": FILE[:60],
    "cut in a tensor": FILE[:-1],
    "longer": FILE + b"\0",
    "a length beyond its end": b"\xff" * 8 + FILE[8:],
    "no object": (2).to_bytes(8, "little") + b"[]",
    "an unknown kind": FILE.replace(b"F32", b"F33"),
    "another shape": FILE.replace(b"[4]", b"[5]"),
    "a negative shape": FILE.replace(b"[4]", b"[-"),
    "offsets that lie elsewhere": FILE.replace(b"[0,16]", b"[4,20]"),
    "offsets that are none": FILE.replace(b"[0,16]", b'"0,16"'),
    "a hole": FILE.replace(b"[4]", b"[2]").replace(b"[0,16]", b"[0,8] "),
}


@pytest.mark.parametrize("file", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_file_is_an_error(file: bytes) -> None:
    assert file != FILE
    with pytest.raises(ValueError, match=r"."):
        safetensors_writer.read(file)


def test_a_kind_of_numbers_that_no_model_has_is_an_error() -> None:
    with pytest.raises(AssertionError, match="odd is of complex64"):
        safetensors_writer.pieces({"odd": np.zeros(2, np.complex64)}, {})
