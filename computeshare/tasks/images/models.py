"""Image classifiers by name.

Every model maps float32 images (n, channels, height, width) to logits (n, classes). Initialisation is PyTorch's or
torchvision's own, drawn from the job's seed, so every machine with the same torch starts from the same weights.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from computeshare.errors import SpecError
from computeshare.tasks import modules

Shape = tuple[int, ...]


def build(name: str, shape: Shape, classes: int, seed: int) -> nn.Module:
    """Build a model on the CPU, initialised from `seed`; torch's global generators stay as they were.

    Args:
        name: a model of the catalog.
        shape: channels, height and width of its input; `mlp` takes any shape.
        classes: length of its logits.
        seed: 0 to 2**63 - 1.
    Raises: SpecError: the name is unknown, or the model cannot take this shape.
    """
    with modules.drawn_from(seed):
        return OWN[name](shape, classes) if name in OWN else _torchvision_model(name, shape, classes)


def construction(name: str, shape: Shape, classes: int) -> str:
    """Python code that builds the same module as `build`, by torchvision alone where its own constructor does."""
    altered = name in OWN or name in _GRAINS or name in ("googlenet", "inception_v3") or shape[0] != 3
    if altered:
        module = f"models.build({name!r}, {shape!r}, classes={classes}, seed=0)"
        return f"from computeshare.tasks.images import models\n\nmodule = {module}"
    return f"import torchvision\n\nmodule = torchvision.models.get_model({name!r}, num_classes={classes})"


def outline(name: str, shape: Shape, classes: int) -> nn.Module:
    """As `build`, on the meta device, where tensors have shapes but no values and take no memory."""
    with modules.ParametersOnMeta(), torch.no_grad():
        return build(name, shape, classes, 0).to("meta")


def mlp(shape: Shape, classes: int) -> nn.Module:
    """A perceptron with hidden layers of 128 and 64 units, for inputs of any shape."""
    return _sequential(
        flatten=nn.Flatten(),
        fc1=nn.Linear(int(np.prod(shape)), 128),
        relu1=nn.ReLU(),
        fc2=nn.Linear(128, 64),
        relu2=nn.ReLU(),
        fc3=nn.Linear(64, classes),
    )


def lenet5(shape: Shape, classes: int) -> nn.Module:
    """LeNet-5 with ReLU and max pooling: 61,706 parameters on 1x28x28 and 10 classes.

    Source: LeCun et al., "Gradient-based learning applied to document recognition", 1998.
    """
    height, width = ((side // 2 - 4) // 2 for side in shape[1:])
    _check_size("lenet5", shape, 12)
    return _sequential(
        conv1=nn.Conv2d(shape[0], 6, 5, padding=2),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(6, 16, 5),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        fc1=nn.Linear(16 * height * width, 120),
        relu3=nn.ReLU(),
        fc2=nn.Linear(120, 84),
        relu4=nn.ReLU(),
        fc3=nn.Linear(84, classes),
    )


def simplenet(shape: Shape, classes: int) -> nn.Module:
    """The small network of PyTorch's early MNIST example: 21,840 parameters on 1x28x28 and 10 classes."""
    height, width = (((side - 4) // 2 - 4) // 2 for side in shape[1:])
    _check_size("simplenet", shape, 16)
    return _sequential(
        conv1=nn.Conv2d(shape[0], 10, 5),
        pool1=nn.MaxPool2d(2),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(10, 20, 5),
        drop2=nn.Dropout2d(),
        pool2=nn.MaxPool2d(2),
        relu2=nn.ReLU(),
        flatten=nn.Flatten(),
        fc1=nn.Linear(20 * height * width, 50),
        relu3=nn.ReLU(),
        drop3=nn.Dropout(),
        fc2=nn.Linear(50, classes),
    )


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut without parameters (option A of He et al.): the input itself or, where the
    shape changes, every other of its rows and columns, with channels of zeros added.
    """

    def __init__(self, before: int, channels: int) -> None:
        super().__init__()
        self.stride, self.added = 1 if before == channels else 2, channels - before
        self.conv1 = nn.Conv2d(before, channels, 3, self.stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, images: Tensor) -> Tensor:
        """Maps (n, before, height, width) to (n, channels, height, width), or half the height and width, rounded up."""
        shortcut = images
        if self.added:
            shortcut = functional.pad(images[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.added))
        inner = functional.relu(self.bn1(self.conv1(images)))
        return functional.relu(self.bn2(self.conv2(inner)) + shortcut)


def small_resnet(shape: Shape, classes: int, depth: int) -> nn.Module:
    """A residual network for small images: `depth` layers, a multiple of 6 and 2 more; 16, 32, then 64 channels.

    Source: He et al., "Deep residual learning for image recognition", 2015, section 4.2.
    """
    widths = [16, *(width for width in (16, 32, 64) for _ in range((depth - 2) // 6))]
    network = _sequential(
        conv1=nn.Conv2d(shape[0], 16, 3, padding=1, bias=False),
        bn1=nn.BatchNorm2d(16),
        relu1=nn.ReLU(),
        blocks=nn.Sequential(*(ResidualBlock(*pair) for pair in pairwise(widths))),
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        fc=nn.Linear(64, classes),
    )
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")  # as torchvision's ResNets
    return network


OWN: dict[str, Callable[[Shape, int], nn.Module]] = {
    "mlp": mlp,
    "lenet5": lenet5,
    "simplenet": simplenet,
    **{f"resnet{depth}": partial(small_resnet, depth=depth) for depth in (20, 32, 56, 110)},
}


def _sequential(**layers: nn.Module) -> nn.Module:
    return nn.Sequential(OrderedDict(layers))


def _check_size(name: str, shape: Shape, smallest: int) -> None:
    if min(shape[1:]) < smallest:
        raise SpecError(
            f"{name} needs an input of at least {smallest}x{smallest}, not {shape[1]}x{shape[2]}: set input"
        )


# Transformers whose weights fix the input size, and the number of pixels it must be a multiple of.
_GRAINS = {"vit_b_16": 16, "vit_b_32": 32, "vit_l_16": 16, "vit_l_32": 32, "vit_h_14": 14, "maxvit_t": 224}


def _torchvision_model(name: str, shape: Shape, classes: int) -> nn.Module:
    from torchvision import models  # seconds to import: only where one of its models is asked for

    if name not in models.list_models(module=models):
        raise SpecError(f"unknown model {name!r}")
    options: dict[str, Any] = {"num_classes": classes}
    if name in ("googlenet", "inception_v3"):  # their auxiliary heads would change what the model returns
        options |= {"aux_logits": False, "init_weights": True}
    grain = _GRAINS.get(name)
    if grain:
        _check_size(name, shape, grain)
        side = -(-max(shape[1:]) // grain) * grain
        options |= {"input_size": (side, side)} if name == "maxvit_t" else {"image_size": side}
    model: nn.Module = models.get_model(name, weights=None, **options)
    _fit_channels(model, shape[0])
    if grain and shape[1:] != (side, side):
        model.register_forward_pre_hook(_padding(side - shape[1], side - shape[2]))
    return model


def _fit_channels(model: nn.Module, channels: int) -> None:
    """Replace the first convolution by one with `channels` inputs and otherwise the same arguments."""
    name, old = next((n, m) for n, m in model.named_modules() if isinstance(m, nn.Conv2d))
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
