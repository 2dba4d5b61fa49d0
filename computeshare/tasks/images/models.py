"""Image classifiers by name.

Every model maps float32 images (n, channels, height, width) to logits (n, classes). Initialisation is PyTorch's or
torchvision's own, drawn from the job's seed, so every machine with the same torch starts from the same weights.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from computeshare.errors import SpecError
from computeshare.tasks import modules
from computeshare.tasks.images import small_models
from computeshare.tasks.source import source_of

Shape = tuple[int, ...]
RGB = 3
"""The channels of images that torchvision's models take."""


def build(name: str, shape: Shape, classes: int, seed: int) -> nn.Module:
    """Build a model on the CPU, initialised from `seed`; torch's global generators stay as they were.

    Args:
        name: a model of the catalog.
        shape: channels, height and width of its input; `mlp` takes any shape.
        classes: length of its logits.
        seed: 0 to 2**63 - 1.
    Raises: SpecError: the name is unknown, or the model cannot take this shape.
    """
    if name in _SMALLEST:
        _check_size(name, shape, _SMALLEST[name])
    with modules.drawn_from(seed):
        return OWN[name](shape, classes) if name in OWN else _torchvision_model(name, shape, classes)


def construction(name: str, shape: Shape, classes: int) -> str:
    """Python code that builds the same module as `build` by PyTorch and torchvision alone, with weights of its own."""
    if name in OWN:
        function = OWN[name]
        builder, named = (function.func, function.keywords) if isinstance(function, partial) else (function, {})
        depth = "".join(f", {key}={value}" for key, value in named.items())
        return f"{source_of(builder)}\n\n\nmodule = {builder.__name__}({shape!r}, {classes}{depth})"
    options, (rows, columns) = _torchvision_options(name, shape, classes)
    if "init_weights" in options:
        options["init_weights"] = False  # seconds for values that the trained ones replace
    arguments = "".join(f", {key}={value!r}" for key, value in options.items())
    imports, code = ["import torchvision"], [f"module = torchvision.models.get_model({name!r}{arguments})"]
    if shape[0] != RGB:
        layer, made = _first_convolution(outline(name, shape, classes))
        imports.append("from torch import nn")
        code.append(f"module.set_submodule({layer!r}, nn.{made})")
    if rows or columns:
        imports.append("from torch.nn import functional")
        pad = f"functional.pad(inputs[0], (0, {columns}, 0, {rows}))"
        code.append(f"module.register_forward_pre_hook(lambda _, inputs: {pad})")
    return "\n".join([*imports, "", *code])


def outline(name: str, shape: Shape, classes: int) -> nn.Module:
    """As `build`, on the meta device, where tensors have shapes but no values and take no memory."""
    with modules.ParametersOnMeta(), torch.no_grad():
        return build(name, shape, classes, 0).to("meta")


OWN: dict[str, Callable[[Shape, int], nn.Module]] = {
    "mlp": small_models.mlp,
    "lenet5": small_models.lenet5,
    "simplenet": small_models.simplenet,
    **{f"resnet{depth}": partial(small_models.small_resnet, depth=depth) for depth in (20, 32, 56, 110)},
}
_SMALLEST = {"lenet5": 12, "simplenet": 16}
"""The smallest height and width."""


def _check_size(name: str, shape: Shape, smallest: int) -> None:
    if min(shape[1:]) < smallest:
        raise SpecError(
            f"{name} needs an input of at least {smallest}x{smallest}, not {shape[1]}x{shape[2]}: set input"
        )


# Transformers whose weights fix the input size, and the number of pixels it must be a multiple of.
_GRAINS = {"vit_b_16": 16, "vit_b_32": 32, "vit_l_16": 16, "vit_l_32": 32, "vit_h_14": 14, "maxvit_t": 224}


def _torchvision_options(name: str, shape: Shape, classes: int) -> tuple[dict[str, Any], tuple[int, int]]:
    """The arguments of torchvision's constructor, and the rows and columns to pad its input by."""
    options: dict[str, Any] = {"num_classes": classes}
    if name in ("googlenet", "inception_v3"):  # their auxiliary heads would change what the model returns
        options |= {"aux_logits": False, "init_weights": True}
    grain = _GRAINS.get(name)
    if not grain:
        return options, (0, 0)
    _check_size(name, shape, grain)
    side = -(-max(shape[1:]) // grain) * grain
    options |= {"input_size": (side, side)} if name == "maxvit_t" else {"image_size": side}
    return options, (side - shape[1], side - shape[2])


def _torchvision_model(name: str, shape: Shape, classes: int) -> nn.Module:
    from torchvision import models  # seconds to import: only where one of its models is asked for

    if name not in models.list_models(module=models):
        raise SpecError(f"unknown model {name!r}")
    options, padding = _torchvision_options(name, shape, classes)
    model: nn.Module = models.get_model(name, weights=None, **options)
    _fit_channels(model, shape[0])
    if any(padding):
        model.register_forward_pre_hook(_padding(*padding))
    return model


def _first_convolution(model: nn.Module) -> tuple[str, nn.Conv2d]:
    return next((name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d))


def _fit_channels(model: nn.Module, channels: int) -> None:
    """Replace the first convolution by one with `channels` inputs and otherwise the same arguments."""
    name, old = _first_convolution(model)
    if old.in_channels == channels:
        return
    new = nn.Conv2d(
        channels,
        old.out_channels,
        old.kernel_size,  # type: ignore[arg-type]
        old.stride,  # type: ignore[arg-type]
        old.padding,  # type: ignore[arg-type]
        old.dilation,  # type: ignore[arg-type]
        old.groups,
        old.bias is not None,
        old.padding_mode,
    )
    model.set_submodule(name, new)


def _padding(rows: int, columns: int) -> Callable[[nn.Module, tuple[torch.Tensor]], torch.Tensor]:
    def pad(_: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        return functional.pad(inputs[0], (0, columns, 0, rows))

    return pad
