"""Any module: its initial weights from a seed, and its weights as flat vectors."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from computeshare.errors import SpecError
from computeshare.tensors.layout import Kind, Layout, Weights

_drawing = threading.RLock()
"""Held while weights are initialised: torch's generator is global, and a reducer has a thread for each job."""


@contextmanager
def drawn_from(seed: int) -> Iterator[None]:
    """Draw from `seed` (0 to 2**63 - 1) on the CPU within the block; torch's global generators stay as they were."""
    with _drawing, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


_DRAWING = (nn.init.normal_, torch.Tensor.normal_)
"""Functions for which, on the meta device, torch imports its compiler, which takes seconds."""


class ParametersOnMeta(TorchFunctionMode):
    """Puts uninitialised tensors (the parameters) on the meta device; RegNets need real tensors to compute widths."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if function in _DRAWING and (tensor := args[0] if args else options["tensor"]).is_meta:
            return tensor
        if function is torch.empty:
            options["device"] = "meta"
        return function(*args, **options)


def outside_state(module: nn.Module) -> list[torch.Tensor]:
    """The module's tensors that are not in its `state_dict`: buffers that are not saved, and plain attributes."""
    state = {id(tensor) for tensor in module.state_dict(keep_vars=True).values()}
    held = (tensor for one in module.modules() for value in vars(one).values() for tensor in _tensors_in(value))
    return [tensor for tensor in (*module.buffers(), *held) if id(tensor) not in state]


def _tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """The tensors of an attribute, but for those that modules register."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < 4 and isinstance(value, list | tuple | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(part, depth + 1)


ALIGNMENT = 64
"""Bytes, of which the addresses of torch's own tensors are multiples."""


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in memory aligned as torch's own: itself, or a copy, for example of a view of a file.

    The last bits of a product of matrices depend on where in memory they lie.
    """
    return tensor.clone() if tensor.device.type == "cpu" and tensor.data_ptr() % ALIGNMENT else tensor


def layout_of(module: nn.Module) -> Layout:
    """The layout of what is trained of the module's `state_dict`, in flat vectors.

    A tensor with several names (tied weights) has one entry, by the first of them; parameters that need no gradient
    have none. Raises: SpecError: a tensor is neither float32 nor an int64 buffer.
    """
    return Layout.build((name, tuple(tensor.shape), kind) for name, tensor, kind in entries(module))


def weights_of(module: nn.Module, layout: Layout) -> Weights:
    """A copy of the module's state; `layout` must be the module's own."""
    state = module.state_dict()
    weights = Weights(
        np.empty(layout.parameters, np.float32),
        np.empty(layout.buffers, np.float32),
        np.empty(layout.counters, np.int64),
    )
    for name, view in layout.views(weights).items():
        view[...] = state[name].cpu().numpy()
    return weights


def load_weights(module: nn.Module, layout: Layout, weights: Weights) -> None:
    """Copy `weights` into the module. Raises ShapeError: they do not fit `layout`."""
    views = layout.views(weights)
    with torch.no_grad():
        for name, tensor, _ in entries(module):
            tensor.copy_(torch.tensor(views[name]))  # a copy: torch warns of NumPy arrays it must not write to


def entries(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, Kind]]:
    """Yield name, live tensor and kind of each entry of the layout, in the `state_dict`'s order. Raises SpecError."""
    seen: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen and not is_frozen(tensor):
            yield name, tensor, _kind(name, tensor)
        seen.add(id(tensor))


def is_frozen(tensor: torch.Tensor) -> bool:
    """Whether a tensor of a module's state is a parameter that needs no gradient."""
    return isinstance(tensor, nn.Parameter) and not tensor.requires_grad


def has_frozen(module: nn.Module) -> bool:
    """Whether a module has parameters that need no gradient."""
    return any(map(is_frozen, module.parameters()))


def frozen_digest(module: nn.Module) -> str:
    """The sha256, in hex, of the parameters that need no gradient: names, types, shapes, values; empty if there are
    none. They do not travel: every machine builds them, and all must build the same.
    """
    if not has_frozen(module):
        return ""
    found = hashlib.sha256()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if is_frozen(tensor):
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            values = tensor.detach().cpu().contiguous().flatten()
            found.update(values.view(torch.uint8).numpy().data)
    return found.hexdigest()


def _kind(name: str, tensor: torch.Tensor) -> Kind:
    parameter = isinstance(tensor, nn.Parameter)
    if tensor.dtype == torch.float32:
        return "parameter" if parameter else "buffer"
    if tensor.dtype == torch.int64 and not parameter:
        return "counter"
    raise SpecError(f"the model's {name} is {tensor.dtype}; only float32, and int64 for buffers, are supported")
