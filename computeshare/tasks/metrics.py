"""Loss and accuracy of weights on a split."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from computeshare.tasks.images.datasets import Split
from computeshare.tasks.modules import load_weights
from computeshare.tensors.layout import Layout, Weights


@dataclass(frozen=True, slots=True)
class SplitScore:
    """Mean cross-entropy and accuracy (a fraction) over `samples` samples."""

    loss: float
    accuracy: float
    samples: int


def score(module: nn.Module, layout: Layout, weights: Weights, split: Split, batch: int = 256) -> SplitScore:
    """Load `weights` into `module` and score them on the whole split, on the module's device, in the split's order.

    Raises: ShapeError: the weights do not fit `layout`.
    """
    load_weights(module, layout, weights)
    device = next(module.parameters()).device
    loss, correct = 0.0, 0
    module.eval()
    with torch.inference_mode():
        for start in range(0, len(split), batch):
            images, labels = split.batch(np.arange(start, min(start + batch, len(split))))
            logits, labels = module(images.to(device)), labels.to(device)
            loss += functional.cross_entropy(logits, labels, reduction="sum").item()
            correct += int((logits.argmax(dim=1) == labels).sum().item())
    return SplitScore(loss / len(split), correct / len(split), len(split))
