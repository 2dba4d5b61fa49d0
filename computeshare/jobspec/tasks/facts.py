"""What is known of a job's task without its code: control plane and reducer work with these facts. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from computeshare.jobspec.catalog import catalog
from computeshare.jobspec.tasks.language_models import LANGUAGE_MODELS, GptArgs, samples, train_characters

Metric = Literal["accuracy", "loss"]


@dataclass(frozen=True, slots=True)
class TaskFacts:
    """The samples of each split, the number of parameters (at most), and what versions are compared by on the test
    split: `accuracy`, of which more is better, or `loss`, of which less is.
    """

    train: int
    test: int
    parameters: int
    metric: Metric


def metric_of(model: str) -> Metric:
    """What versions of a model are compared by."""
    return "loss" if model in LANGUAGE_MODELS else "accuracy"


def of_images(dataset: str, model: str, shape: tuple[int, int, int]) -> TaskFacts:
    """A classifier of images of this shape (channels, height, width), by names of the catalog."""
    entry = catalog().models[model]
    parameters = entry.parameters
    if entry.grows:  # its first dense layer, with the input
        size, reference = (c * h * w for c, h, w in (shape, entry.reference_shape))
        parameters = max(parameters, -(-parameters * size // reference))
    parameters += max(0, catalog().datasets[dataset].classes - 10) * entry.parameters_per_class  # of the last layer
    return TaskFacts(*split_samples(dataset, None), parameters, metric_of(model))


def of_text(dataset: str, model: str, args: GptArgs) -> TaskFacts:
    """A language model on a text of the catalog."""
    parameters = args.parameters(catalog().texts[dataset].symbols)
    return TaskFacts(*split_samples(dataset, args), parameters, metric_of(model))


def split_samples(dataset: str, args: GptArgs | None) -> tuple[int, int]:
    """The samples of a data set that train, and those that test; a text's depend on the language model's `args`."""
    if args is None:
        images = catalog().datasets[dataset]
        return images.train, images.test
    characters = catalog().texts[dataset].characters
    train = train_characters(characters)
    return samples(train, args.block_size), samples(characters - train, args.block_size)


def goodness(score: Mapping[str, Any]) -> float:
    """How good a version is, by its score on the test split: its accuracy, or minus its loss where there is none."""
    accuracy, loss = score.get("accuracy"), score.get("loss")
    value = accuracy if accuracy is not None else -loss if loss is not None else -math.inf
    return float(value) if math.isfinite(value) else -math.inf


def perplexity(loss: float | None) -> float | None:
    """e to the power of a loss in nats per token; None without a loss, or where no float holds it."""
    return math.exp(loss) if loss is not None and loss < 700 else None
