"""The initial state of a recipe's module in two safetensors files: the trained part of version 0, and what is frozen.

They are written once, where the job is created, so that no result depends on which machine builds the module.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from computeshare.errors import RecipeError
from computeshare.jobspec.tasks.recipe_facts import FROZEN, INITIAL
from computeshare.tasks import modules
from computeshare.tensors import safetensors_writer
from computeshare.tensors.layout import Layout, Weights


def write(module: nn.Module, folder: Path) -> None:
    """Write the module's state below `folder`: `INITIAL` and, if it has parameters that need no gradient, `FROZEN`.

    Raises: SpecError: as `modules.layout_of`. OSError.
    """
    layout = modules.layout_of(module)
    with (folder / INITIAL).open("wb") as file:
        views = layout.views(modules.weights_of(module, layout))
        file.writelines(safetensors_writer.pieces(views, {}))
    if frozen := _frozen(module):
        _write_aligned({name: one.detach().cpu().contiguous() for name, one in frozen.items()}, folder / FROZEN)


def _write_aligned(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write a file whose values begin at a multiple of `ALIGNMENT`, so that tensors mapped from it are aligned as long
    as their sizes are: the format aligns them to 8 bytes alone.
    """
    save_file({**tensors}, path, {"padding": ""})
    with path.open("rb") as file:
        begin = 8 + int.from_bytes(file.read(8), "little")
    if missing := -begin % modules.ALIGNMENT:
        save_file({**tensors}, path, {"padding": " " * missing})


def read_initial(folder: Path, layout: Layout) -> Weights:
    """Version 0's weights from `INITIAL` below `folder`. Raises RecipeError: they are missing, damaged, not finite, or
    not those of `layout`.
    """
    try:
        return _weights(np.memmap(folder / INITIAL, mode="r").data, layout)
    except (OSError, ValueError) as error:
        raise RecipeError(f"the initial weights cannot be read: {error}") from error


def _weights(content: memoryview, layout: Layout) -> Weights:
    """Raises ValueError."""
    tensors, _ = safetensors_writer.read(content)
    found = {name: (one.shape, one.dtype.name) for name, one in tensors.items()}
    wanted = {one.name: (one.shape, "int64" if one.kind == "counter" else "float32") for one in layout.tensors}
    if wrong := [name for name in {**wanted, **found} if found.get(name) != wanted.get(name)]:
        raise ValueError(f"{wrong[0]} is missing, unknown, or of another shape or type than the job's facts say")
    for name, one in tensors.items():
        if not np.isfinite(one).all():
            raise ValueError(f"{name} has values that are not finite")
    return layout.gather(tensors)


def load_frozen(module: nn.Module, folder: Path) -> None:
    """Replace the module's parameters that need no gradient by those of `FROZEN` below `folder`, mapped into memory;
    those that are not aligned there are copied.

    Raises: RecipeError: the file is missing or damaged, or its tensors are not the module's.
    """
    frozen = _frozen(module)
    if not frozen:
        return
    try:
        with safe_open(folder / FROZEN, framework="pt") as file:
            stored = {name: file.get_tensor(name) for name in file.offset_keys()}
    except (OSError, SafetensorError) as error:
        raise RecipeError(f"the frozen parameters cannot be read: {error}") from error
    for name in {**frozen, **stored}:
        if _form(frozen.get(name)) != _form(stored.get(name)):
            raise RecipeError(
                f"{name}, which is frozen, is {_form(frozen.get(name))} in the module that model() builds here, and "
                f"{_form(stored.get(name))} in the job: install the same versions of packages as where it was created"
            )
    for name, parameter in frozen.items():
        parameter.data = modules.aligned(stored[name])


def _frozen(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters that need no gradient, each under its first name."""
    named: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if modules.is_frozen(tensor):
            named.setdefault(id(tensor), (name, tensor))
    return dict(named.values())


def _form(tensor: torch.Tensor | None) -> str:
    return "missing" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}".removeprefix("torch.")
