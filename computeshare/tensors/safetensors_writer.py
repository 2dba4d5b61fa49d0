"""Reads and writes the safetensors format without copying the tensors.

The safetensors library copies them both ways. Copying half a gigabyte holds the interpreter's lock, and with it every
other thread, for seconds.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from computeshare.types import Blob

_KINDS = {"<f4": "F32", "<f8": "F64", "<i8": "I64", "<i4": "I32", "|u1": "U8", "|b1": "BOOL"}
"""The format's names for the number types of models and optimizers, by NumPy's names."""
_DTYPES = {kind: np.dtype(name) for name, kind in _KINDS.items()}
_LENGTH_BYTES = 8


def pieces(tensors: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, str]) -> list[Blob]:
    """A file's header, then each tensor's bytes, as views of contiguous tensors."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    bodies: list[Blob] = []
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda one: (-one[1].itemsize, one[0])):  # so that all lie aligned
        start, end = end, end + tensor.nbytes
        assert tensor.dtype.str in _KINDS, f"{name} is of {tensor.dtype}: name that kind of numbers here"
        header[name] = {"dtype": _KINDS[tensor.dtype.str], "shape": tensor.shape, "data_offsets": [start, end]}
        bodies.append(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(_LENGTH_BYTES, "little") + text, *bodies]


def read(file: Blob) -> tuple[dict[str, npt.NDArray[Any]], dict[str, str]]:
    """A file's tensors, as views of it, and its metadata. Raises ValueError: the file is damaged."""
    view = memoryview(file)
    length = int.from_bytes(view[:_LENGTH_BYTES], "little")
    body = view[_LENGTH_BYTES + length :]
    try:
        header = json.loads(bytes(view[_LENGTH_BYTES : _LENGTH_BYTES + length]))
        metadata = dict(header.pop("__metadata__", {}))
        tensors = {name: _tensor(body, **entry) for name, entry in header.items()}
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"its header cannot be read: {error}") from error
    if sum(tensor.nbytes for tensor in tensors.values()) != len(body):
        raise ValueError(f"its tensors do not fill its {len(body)} bytes")
    return tensors, metadata


def _tensor(body: memoryview, dtype: str, shape: list[int], data_offsets: list[int]) -> npt.NDArray[Any]:
    start, stop = data_offsets
    kind, count = _DTYPES[dtype], math.prod(shape)
    if not 0 <= start <= stop <= len(body) or min(shape, default=0) < 0 or stop - start != count * kind.itemsize:
        raise ValueError(f"a tensor of shape {shape} cannot lie between bytes {start} and {stop} of {len(body)}")
    return np.frombuffer(body[start:stop], kind).reshape(shape) if count else np.empty(shape, kind)
