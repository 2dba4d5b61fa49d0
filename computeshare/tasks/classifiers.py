"""Loss and scores of classifiers: modules that map inputs to logits (n, classes), on batches of inputs and labels."""

from torch import Tensor, nn
from torch.nn import functional

from computeshare.tasks.base import CLASSES, PREDICTED

Pair = tuple[Tensor, Tensor]


def loss(module: nn.Module, batch: Pair, label_smoothing: float) -> Tensor:
    """The mean cross-entropy; `label_smoothing` is the share of each label that is spread over all classes."""
    inputs, labels = batch
    return functional.cross_entropy(module(inputs), labels, label_smoothing=label_smoothing)


def sums(module: nn.Module, batch: Pair) -> dict[str, Tensor]:
    """The sums of cross-entropy and hits, and each sample's class and the class it was given."""
    inputs, labels = batch
    logits = module(inputs)
    total = functional.cross_entropy(logits, labels, reduction="sum")
    predicted = logits.argmax(dim=1)
    return {"loss": total, "accuracy": (predicted == labels).sum(), CLASSES: labels, PREDICTED: predicted}
