"""The safetensors format, written without copying the tensors as the library's own writer does twice; the library reads
it.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from computeshare.types import Blob

_KINDS = {"<f4": "F32", "<f8": "F64", "<i8": "I64", "<i4": "I32", "|u1": "U8", "|b1": "BOOL"}
"""What the format calls the kinds of numbers that models and optimizers have."""


def pieces(tensors: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, str]) -> list[Blob]:
    """A file's header, then each tensor's bytes, which are views of it where it is contiguous."""
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
    return [len(text).to_bytes(8, "little") + text, *bodies]
