"""The names of classes, for data sets whose authors publish them in words."""

from collections.abc import Mapping, Sequence

_DIGITS = tuple("0123456789")
NAMES: Mapping[str, Sequence[str]] = {
    "digits": _DIGITS,
    "mnist": _DIGITS,
    "fashion-mnist": (
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    ),
    "kmnist": ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo"),
    "cifar10": ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
}  # fmt: skip
