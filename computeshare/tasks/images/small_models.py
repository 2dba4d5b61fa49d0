"""Small image classifiers in plain PyTorch: model cards repeat their source, so that it imports nothing else.

Initialisation is PyTorch's own where nothing else is said.
"""

import math
from collections import OrderedDict
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional


def mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A perceptron with hidden layers of 128 and 64 units, for inputs of any shape."""
    return _sequential(
        flatten=nn.Flatten(),
        fc1=nn.Linear(math.prod(shape), 128),
        relu1=nn.ReLU(),
        fc2=nn.Linear(128, 64),
        relu2=nn.ReLU(),
        fc3=nn.Linear(64, classes),
    )


def lenet5(shape: tuple[int, ...], classes: int) -> nn.Module:
    """LeNet-5 with ReLU and max pooling: 61,706 parameters on 1x28x28 and 10 classes.

    Source: LeCun et al., "Gradient-based learning applied to document recognition", 1998.
    """
    height, width = ((side // 2 - 4) // 2 for side in shape[1:])
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


def simplenet(shape: tuple[int, ...], classes: int) -> nn.Module:
    """The small network of PyTorch's early MNIST example: 21,840 parameters on 1x28x28 and 10 classes."""
    height, width = (((side - 4) // 2 - 4) // 2 for side in shape[1:])
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


def small_resnet(shape: tuple[int, ...], classes: int, depth: int) -> nn.Module:
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


def _sequential(**layers: nn.Module) -> nn.Module:
    return nn.Sequential(OrderedDict(layers))
