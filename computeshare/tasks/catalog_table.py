"""`python -m computeshare.tasks.catalog_table` rewrites `jobspec/catalog.json` from torch and torchvision."""

import inspect
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import computeshare.jobspec.catalog
from computeshare.errors import SpecError
from computeshare.jobspec.catalog import normalized_name
from computeshare.tasks import modules
from computeshare.tasks.images import models
from computeshare.tasks.images.datasets.definitions import DEFINITIONS, NOT_OFFERED
from computeshare.tasks.text import texts

# Left out: LBFGS steps from a closure, SparseAdam from sparse gradients, and Muon takes only matrices, which no model
# here consists of alone.
_LEFT_OUT = {"LBFGS", "SparseAdam", "Muon", "Optimizer"}
_NOT_OFFERED = {"params", "foreach", "fused", "capturable", "differentiable"}
_LARGEST_SIZE = 320
_TINY = 1e-3
"""The distance from a candidate bound at which torch is tried."""


def build_catalog() -> dict[str, Any]:
    """The whole table, in the format of `computeshare.jobspec.catalog.Catalog`. Takes about a minute."""
    import torchvision

    return {
        "torch": _release(torch.__version__),
        "torchvision": _release(torchvision.__version__),
        "datasets": dataset_entries(),
        "not_offered": {normalized_name(name): why for name, why in NOT_OFFERED.items()},
        "texts": text_entries(),
        "models": {name: {"min_size": min_size(name), **model_facts(name)} for name in model_names()},
        "optimizers": optimizer_entries(),
    }


def dataset_entries() -> dict[str, Any]:
    return {
        name: {
            "shape": list(one.shape),
            "classes": one.classes,
            "train": one.train,
            "test": one.test,
            "source": "torchvision" if one.published else "scikit-learn",
            "requires": list(one.requires),
        }
        for name, one in DEFINITIONS.items()
    }


def text_entries() -> dict[str, Any]:
    return {
        name: {"characters": text.characters, "symbols": len(text.alphabet), "source": text.source}
        for name, text in texts.DEFINITIONS.items()
    }


def optimizer_entries() -> dict[str, Any]:
    """Every optimizer that steps from `.grad`, with the arguments its constructor has."""
    found = inspect.getmembers(torch.optim, lambda c: inspect.isclass(c) and issubclass(c, torch.optim.Optimizer))
    return {name: {"arguments": _arguments(optimizer)} for name, optimizer in found if name not in _LEFT_OUT}


def takes_arguments(optimizer: type[torch.optim.Optimizer], arguments: dict[str, Any]) -> bool:
    """Whether torch constructs the optimizer with these arguments and takes a step with it."""
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    try:
        optimizer([parameter], **arguments).step()
    except (ValueError, TypeError, RuntimeError, OverflowError, ZeroDivisionError):
        return False
    return True


def model_names() -> list[str]:
    from torchvision import models as vision

    return [*models.OWN, *vision.list_models(module=vision)]


def model_facts(name: str) -> dict[str, Any]:
    """A model's catalog entry without `min_size`, found without running the model."""
    own = name in models.OWN
    shape = ((3, 32, 32) if "resnet" in name else (1, 28, 28)) if own else (3, 224, 224)
    module, wider = (models.outline(name, shape, classes) for classes in (10, 11))
    parameters = modules.layout_of(module).parameters
    grows = own and not any(isinstance(layer, nn.AdaptiveAvgPool2d) for layer in module.modules())
    return {
        "source": "computeshare" if own else "torchvision",
        "batch_norm": any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules()),
        "parameters": parameters,
        "parameters_per_class": modules.layout_of(wider).parameters - parameters,
        "reference_shape": list(shape),
        **({"grows": True} if grows else {}),
    }


def takes(name: str, size: int) -> bool:
    """Whether the model runs on square inputs of this size, in both modes, in batches of two."""
    try:
        module = models.outline(name, (3, size, size), 10)
        for mode in (True, False):
            module.train(mode)(torch.empty(2, 3, size, size, device="meta"))
    except (RuntimeError, ValueError, SpecError):
        return False
    return True


def min_size(name: str) -> int:
    """The smallest square input: doubled until the model takes it, then bisected. Raises RuntimeError if none is."""
    high = 1
    while not takes(name, high):
        high *= 2
        if high > _LARGEST_SIZE:
            raise RuntimeError(f"{name} takes no input up to {high // 2}")
    low = high // 2  # is not taken, or is 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if takes(name, middle) else (middle, high)
    return high


def _arguments(optimizer: type[torch.optim.Optimizer]) -> dict[str, Any]:
    parameters = inspect.signature(optimizer).parameters.values()
    entries = {p.name: _argument(p.annotation, p.default) for p in parameters if p.name not in _NOT_OFFERED}
    for name, entry in entries.items():
        if entry["kind"] in ("number", "numbers"):
            entry["ranges"] = _ranges(optimizer, name, entry["default"])
    return entries


def _ranges(optimizer: type[torch.optim.Optimizer], name: str, default: Any) -> list[dict[str, Any]]:
    """The range torch accepts for a number, or for each number of a tuple, all other arguments at defaults."""
    if not isinstance(default, list):
        return [_range(lambda value: takes_arguments(optimizer, {name: value}), nullable=False)]

    def takes_at(index: int, value: float) -> bool:
        numbers = [*default[:index], value, *default[index + 1 :]]
        return takes_arguments(optimizer, {name: tuple(numbers)})

    return [_range(partial(takes_at, index), one is None) for index, one in enumerate(default)]


def _range(taken: Callable[[float], bool], nullable: bool) -> dict[str, Any]:
    """The bounds that torch enforces, found by trying; each is 0 or 1."""
    found: dict[str, Any] = {"nullable": True} if nullable else {}
    for bound in (0.0, 1.0):
        below, at, above = taken(bound - _TINY), taken(bound), taken(bound + _TINY)
        if above and not below:
            found["ge" if at else "gt"] = bound
        if below and not above:
            found["le" if at else "lt"] = bound
    return found


def _argument(annotation: Any, default: Any) -> dict[str, Any]:
    """An argument's kind and default, and whether it may be null."""
    text = str(annotation)
    if isinstance(default, tuple):
        return {"kind": "numbers", "default": list(default)}
    if isinstance(default, bool):
        return {"kind": "boolean", "default": default}
    if "float" in text:
        return {"kind": "number", "default": float(default)}
    kind = "string" if "str" in text else "integer"
    return {"kind": kind, "default": default, "nullable": default is None}


def _release(version: str) -> str:
    """A version without the build's suffix (`+cu132`), which does not affect the catalog."""
    return version.split("+", maxsplit=1)[0]


def path() -> Path:
    return Path(computeshare.jobspec.catalog.__file__).with_suffix(".json")


if __name__ == "__main__":
    path().write_text(json.dumps(build_catalog(), indent=1) + "\n")
