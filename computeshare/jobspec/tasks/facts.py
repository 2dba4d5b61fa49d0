"""Sizes of a job's task from the catalog, without torch: for control plane and reducer. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from computeshare.jobspec.catalog import DatasetEntry, catalog
from computeshare.jobspec.tasks.language_models import LANGUAGE_MODELS, GptArgs, samples, train_characters

Metric = Literal["accuracy", "loss"]


@dataclass(frozen=True, slots=True)
class TaskFacts:
    """The number of samples in each split, the largest number of parameters, and the metric by which versions are
    compared: `accuracy` (higher is better) or `loss` (lower is better).
    """

    train: int
    test: int
    parameters: int
    metric: Metric


def metric_of(model: str) -> Metric:
    """The metric by which versions of a model are compared."""
    return "loss" if model in LANGUAGE_MODELS else "accuracy"


def of_images(images: DatasetEntry, model: str, shape: tuple[int, int, int]) -> TaskFacts:
    """Facts of an image classifier, from its name in the catalog and the input's shape (channels, height, width)."""
    entry = catalog().models[model]
    parameters = entry.parameters
    if entry.grows:  # its first dense layer, with the input
        size, reference = (c * h * w for c, h, w in (shape, entry.reference_shape))
        parameters = max(parameters, -(-parameters * size // reference))
    parameters += max(0, images.classes - 10) * entry.parameters_per_class  # of the last layer
    return TaskFacts(images.train, images.test, parameters, metric_of(model))


def of_text(dataset: str, model: str, args: GptArgs) -> TaskFacts:
    """Facts of a language model on a text of the catalog."""
    characters = catalog().texts[dataset].characters
    train = train_characters(characters)
    sizes = samples(train, args.block_size), samples(characters - train, args.block_size)
    return TaskFacts(*sizes, args.parameters(catalog().texts[dataset].symbols), metric_of(model))


def goodness(score: Mapping[str, Any]) -> float:
    """A number that is higher for better scores: the accuracy, or minus the loss if there is no accuracy."""
    accuracy, loss = score.get("accuracy"), score.get("loss")
    value = accuracy if accuracy is not None else -loss if loss is not None else -math.inf
    return float(value) if math.isfinite(value) else -math.inf


def perplexity(loss: float | None) -> float | None:
    """e to the power of a loss in nats per token; None without a loss, or where no float holds it."""
    return math.exp(loss) if loss is not None and loss < 700 else None
