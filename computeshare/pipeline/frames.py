"""Values between stages as bytes: tensors, numbers, and tuples, lists and dicts of them. Nothing is unpickled.

A message is a header in JSON, then the data of each tensor, every one a frame with a checksum (`codecs.frame`). The
header states the structure, and each tensor's type, shape, order of dimensions in memory, and whether its gradient is
wanted. The codec, which the job names, applies to float32 tensors; all others travel as they are.
"""

import json
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from computeshare.codecs import frame
from computeshare.codecs.base import Codec
from computeshare.errors import CodecError, SpecError
from computeshare.types import Blob

Value = Any
"""A tensor, None, a number, a text, or a tuple, list or dict (with texts as keys) of values."""
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
    )
}
HEADER_BYTES = 1 << 16
"""The longest header."""
MOST_TENSORS, MOST_DIMENSIONS, DEEPEST = 1024, 16, 16
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class _Form:
    """A tensor without its data; `order` lists its dimensions from the outermost to the innermost in memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[int, ...]
    wants_gradient: bool

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.count * self.dtype.itemsize


def encode(values: Sequence[Value], codec: Codec, seed: int = 0, compress: bool = True) -> bytes:
    """Write values as a message; a tensor that requires grad is marked as one whose gradient is wanted.

    Args:
        seed: of codecs that round at random.
    Raises: SpecError: a value is of another kind.
    """
    tensors: list[Tensor] = []
    structure = _outlined([*values], tensors)
    orders = [_order(tensor) for tensor in tensors]
    told = [
        [str(t.dtype).removeprefix("torch."), [*t.shape], [*order], t.requires_grad]
        for t, order in zip(tensors, orders, strict=True)
    ]
    header = json.dumps({"values": structure, "tensors": told}, separators=(",", ":")).encode()
    if len(header) > HEADER_BYTES or len(tensors) > MOST_TENSORS:
        raise SpecError(f"{len(tensors)} values cross the border of two stages, too many: choose other split points")
    bodies = [
        _body(tensor, order, codec, seed + number, compress)
        for number, (tensor, order) in enumerate(zip(tensors, orders, strict=True))
    ]
    return frame.join([frame.pack(header, compress=False), *bodies])


def decode(blob: Blob, codec: Codec, limit_bytes: int, device: torch.device | None = None) -> list[Value]:
    """Read a message's values; tensors whose gradient is wanted are leaves that require grad.

    Args:
        limit_bytes: the most that all tensors together may take, checked before any is allocated.
    Raises: CodecError: the message is malformed or too large.
    """
    view = memoryview(blob).cast("B")
    length = _LENGTH.unpack_from(view)[0] if len(view) >= _LENGTH.size else -1
    start = _LENGTH.size + length
    if not frame.HEADER_BYTES <= length <= HEADER_BYTES + frame.HEADER_BYTES or start > len(view):
        raise CodecError("truncated: the message has no whole header")
    structure, forms = _parsed(bytes(frame.unpack(view[_LENGTH.size : start], length - frame.HEADER_BYTES)))
    needed = sum(form.bytes for form in forms)
    if needed > limit_bytes:
        raise CodecError(f"too large: values of {needed:,} bytes where at most {limit_bytes:,} are expected")
    bodies = frame.split(view[start:], len(forms))
    tensors = [_tensor(form, body, codec, device) for form, body in zip(forms, bodies, strict=True)]
    found = _filled(structure, tensors)
    if not isinstance(found, list):
        raise CodecError("not a list of values")
    return found


def passed(values: Sequence[Value], codec: Codec, seed: int = 0) -> list[Value]:
    """Values as `decode` would return them after `encode`, to the same bits and in the same order in memory; with an
    exact codec, tensors share their memory where they can.
    """
    if codec.exact:
        return [changed(value, _handed_on) for value in values]
    tensors = [tensor for value in values for tensor in tensors_of(value)]
    device = tensors[0].device if tensors else None
    return decode(encode(values, codec, seed, compress=False), codec, sum(t.nbytes for t in tensors), device)


def tensors_of(value: Value) -> Iterator[Tensor]:
    """All tensors of a value, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(part)


def form_of(values: Sequence[Value]) -> str:
    """The structure of values, with the types and shapes of their tensors, as text. Raises: SpecError, as `encode`."""
    tensors: list[Tensor] = []
    structure = _outlined([*values], tensors)
    return json.dumps([structure, [[str(one.dtype), [*one.shape], one.nbytes] for one in tensors]])


def form_bytes(form: str) -> int:
    """The bytes of all tensors of a form."""
    return sum(one[2] for one in json.loads(form)[1])


def zeros(form: str) -> list[Value]:
    """Values of a form that are zeros; floating-point tensors are leaves that require grad."""
    structure, told = json.loads(form)
    types = (DTYPES[dtype.removeprefix("torch.")] for dtype, _, _ in told)
    tensors = [torch.zeros(shape, dtype=dtype) for (_, shape, _), dtype in zip(told, types, strict=True)]
    values: list[Value] = _filled(structure, [one.requires_grad_(one.is_floating_point()) for one in tensors])
    return values


def changed(value: Value, change: Callable[[Tensor], Value]) -> Value:
    """A value with each of its tensors replaced."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: changed(part, change) for name, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [changed(part, change) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def _handed_on(tensor: Tensor) -> Tensor:
    order = _order(tensor)
    shape = [tensor.shape[dimension] for dimension in order]
    arranged = tensor.detach().permute(order)
    if tensor.storage_offset() or not arranged.is_contiguous():
        arranged = arranged.clone(memory_format=torch.contiguous_format)
    fresh = arranged.as_strided(shape, _strides(shape)).permute(_inverse(order))
    return fresh.requires_grad_(tensor.requires_grad)


def _order(tensor: Tensor) -> tuple[int, ...]:
    """A dense tensor's dimensions from the outermost to the innermost in memory; of any other, as they are numbered."""
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.ndim), key=lambda one: (-strides[one], one)))
    return order if tensor.permute(order).is_contiguous() else tuple(range(tensor.ndim))


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[place + 1 :]) for place in range(len(shape))]


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=lambda place: order[place])


def _body(tensor: Tensor, order: Sequence[int], codec: Codec, seed: int, compress: bool) -> bytes:
    flat = tensor.detach().to("cpu").permute(tuple(order)).contiguous().reshape(-1)
    if flat.dtype == torch.float32 and not codec.exact:
        return codec.encode(flat.numpy(), seed, compress)
    return frame.pack(flat.view(torch.uint8).numpy(), compress)


def _tensor(form: _Form, body: memoryview, codec: Codec, device: torch.device | None) -> Tensor:
    flat = torch.empty(form.count, dtype=form.dtype)
    if form.dtype == torch.float32 and not codec.exact:
        codec.decode(body, form.count, flat.numpy())
    else:
        raw = np.frombuffer(frame.unpack(body, form.bytes), np.uint8)
        np.copyto(flat.view(torch.uint8).numpy(), raw != 0 if form.dtype == torch.bool else raw, casting="unsafe")
    tensor = flat.view([form.shape[one] for one in form.order]).permute(_inverse(form.order))
    return (tensor if device is None else tensor.to(device)).requires_grad_(form.wants_gradient)


def _outlined(value: Value, tensors: list[Tensor], depth: int = 0) -> Any:
    """A value as JSON, its tensors by number."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if depth == DEEPEST:
        raise SpecError("a value that crosses the border of two stages is nested too deep: choose other split points")
    if isinstance(value, Tensor) and str(value.dtype).removeprefix("torch.") in DTYPES and not value.is_sparse:
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, list):
        return [_outlined(part, tensors, depth + 1) for part in value]
    if type(value) in (tuple, torch.Size):
        return {"tuple": [_outlined(part, tensors, depth + 1) for part in value]}
    if type(value) is dict and all(isinstance(name, str) for name in value):
        return {"dict": {name: _outlined(part, tensors, depth + 1) for name, part in value.items()}}
    raise SpecError(
        f"a {type(value).__name__} crosses the border of two stages, where only tensors, numbers, and tuples, lists "
        "and dicts of them can: name other split points (strategy.split)"
    )


def _parsed(header: bytes) -> tuple[Any, list[_Form]]:
    try:
        told = json.loads(header)
        structure, entries = told["values"], told["tensors"]
        if len(entries) > MOST_TENSORS:
            raise ValueError("too many tensors")
        return structure, [_form(*entry) for entry in entries]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CodecError(f"malformed header: {error}"[:200]) from error


def _form(dtype: Any, shape: Any, order: Any, wants_gradient: Any) -> _Form:
    found = DTYPES[dtype]
    if not isinstance(shape, list) or len(shape) > MOST_DIMENSIONS:
        raise ValueError("no shape")
    if not all(type(size) is int and 0 <= size < 1 << 40 for size in shape):
        raise ValueError("no shape")
    if sorted(order) != [*range(len(shape))] or not all(type(one) is int for one in order):
        raise ValueError("no order of dimensions")
    if not isinstance(wants_gradient, bool) or (wants_gradient and not found.is_floating_point):
        raise ValueError("only floating-point tensors have gradients")
    return _Form(found, tuple(shape), tuple(order), wants_gradient)


def _filled(structure: Any, tensors: Sequence[Tensor], depth: int = 0) -> Value:
    if depth == DEEPEST and isinstance(structure, list | dict):
        raise CodecError("malformed header: nested too deep")
    if isinstance(structure, list):
        return [_filled(part, tensors, depth + 1) for part in structure]
    if not isinstance(structure, dict):
        return structure
    ((kind, content),) = structure.items() if len(structure) == 1 else (("", None),)
    if kind == "tensor" and type(content) is int and 0 <= content < len(tensors):
        return tensors[content]
    if kind == "tuple" and isinstance(content, list):
        return tuple(_filled(part, tensors, depth + 1) for part in content)
    if kind == "dict" and isinstance(content, dict):
        return {name: _filled(part, tensors, depth + 1) for name, part in content.items()}
    raise CodecError("malformed header: no such value")
