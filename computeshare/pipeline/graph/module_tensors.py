"""A module's parameters and buffers: without values, by name, and replaced."""

import contextlib
import copy
from typing import Any

import torch
from torch import Tensor, fx, nn


def stand_ins(module: nn.Module, device: str) -> nn.Module:
    """A copy of a module whose parameters and buffers, on meta all of its tensors, have no values; tied weights stay
    tied.
    """
    memo: dict[int, Any] = {}
    for one in module.modules():
        others = vars(one).values() if device == "meta" else ()
        for tensor in (*one._parameters.values(), *one._buffers.values(), *others):
            if isinstance(tensor, Tensor) and id(tensor) not in memo:
                empty = torch.empty_like(tensor, device=device)
                is_parameter = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    return copy.deepcopy(module, memo)


def named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """All parameters and buffers, under all of their names."""
    parameters = module.named_parameters(remove_duplicate=False)
    return [*parameters, *module.named_buffers(remove_duplicate=False)]


def put(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace the parameter or buffer of this name, where the module has it."""
    parent, _, leaf = name.rpartition(".")
    with contextlib.suppress(AttributeError):
        holder = module.get_submodule(parent)
        for tensors in (holder._parameters, holder._buffers):
            if leaf in tensors:
                tensors[leaf] = tensor  # type: ignore[assignment]


def bind_device(module: fx.GraphModule, device: torch.device) -> None:
    """Have tensors that the traced code creates on the device that it was traced on, created on this one."""
    for one in module.modules():
        if isinstance(one, fx.GraphModule):
            for node in one.graph.nodes:
                if isinstance(node.kwargs.get("device"), torch.device):
                    node.kwargs = {**node.kwargs, "device": device}
            one.recompile()
