"""Classifiers of images that a JobSpec may name. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from computeshare.jobspec.catalog import DatasetEntry, catalog
from computeshare.jobspec.part import error_at
from computeshare.jobspec.sampling_plan import Plan
from computeshare.jobspec.tasks import hugging_face, own_data
from computeshare.jobspec.tasks.base import TaskSpec
from computeshare.jobspec.tasks.facts import TaskFacts
from computeshare.jobspec.tasks.hugging_face import HubArgs
from computeshare.jobspec.tasks.language_models import LANGUAGE_MODELS
from computeshare.jobspec.tasks.own_data import DatasetFacts

LARGEST_SIDE = 1024
"""Largest height and width of a model's images."""


@dataclass(frozen=True, slots=True)
class ImageTask(TaskSpec):
    """A classifier on images of the catalog, of Hugging Face, or of a user's.

    Args:
        input: the shape of the model's images; None: the data set's own.
        hub: of a data set of Hugging Face.
        data: of a data set that a user added.
    """

    dataset: str
    model: str
    input: tuple[int, int, int] | None = None
    hub: HubArgs | None = None
    data: DatasetFacts | None = None

    sized_by: ClassVar[str] = "input"

    @property
    def title(self) -> str:
        return f"{self.model} on {self.dataset}"

    @property
    def excluded(self) -> Mapping[str, str]:
        names = {"model_args": f"model {self.model} has no arguments: leave model_args out"}
        return names | own_data.excluded(self.dataset)

    @property
    def needs_facts(self) -> bool:
        if self.hub is not None:
            return self.hub.facts is None
        return self.data is None and own_data.is_own_name(self.dataset)

    @property
    def images(self) -> DatasetEntry:
        """The facts of the data set. Raises ValueError, as `facts`."""
        if self.data is not None:
            return own_data.entry_of(self.data)
        if self.hub is None and self.dataset in catalog().datasets:
            return catalog().datasets[self.dataset]
        if self.hub is None or self.hub.facts is None:
            raise ValueError(f"the facts of {self.dataset} have not been found out yet")
        return hugging_face.entry_of(self.hub.facts)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the model's input images: (channels, height, width), in pixels. Raises ValueError, as `facts`."""
        return self.input or self.images.shape

    @property
    def facts(self) -> TaskFacts:
        images = self.images
        parameters = catalog().models[self.model].parameters_with(math.prod(self.shape), images.classes)
        return TaskFacts(images.train, images.test, parameters, "accuracy")

    @property
    def train(self) -> int:
        return self.images.train

    @property
    def has_buffers(self) -> bool:
        return catalog().models[self.model].batch_norm

    @property
    def bundles(self) -> tuple[str, ...]:
        return (self.data.bundle,) if self.data else ()

    def check_names(self) -> None:
        if self.data and self.data.kind == "files":
            message = f"{self.dataset} is for recipes alone: give recipe in place of model, or add it by another kind"
            raise error_at("JobSpec", "dataset", message)
        if self.dataset in catalog().texts or (self.data and self.data.kind == "text"):
            message = f"{self.model} classifies images, but {self.dataset} is text: choose {', '.join(LANGUAGE_MODELS)}"
            raise error_at("JobSpec", "model", message)

    def check_sizes(self, plan: Plan) -> None:
        model, (channels, height, width) = catalog().models[self.model], self.shape
        if max(height, width) > LARGEST_SIDE:
            raise ValueError(
                f"{self.dataset} has images of {height}x{width}: set input to [{channels}, 224, 224] or so"
            )
        if min(height, width) < model.min_size:
            side, has = max(32, model.min_size), "input is" if self.input else f"{self.dataset} has"
            raise ValueError(
                f"model {self.model} needs an input of at least {model.min_size}x{model.min_size}, "
                f"but {has} {height}x{width}: set input, for example to [{channels}, {side}, {side}], "
                f"or choose model mlp"
            )
        for number, which in ((0, "a"), (plan.micro_batches_per_epoch - 1, "the last")):
            if model.batch_norm and any(one.stop - one.start == 1 for one in plan.pieces(number)):
                piece = f"{which} micro-batch has" if plan.accumulate == 1 else f"a piece of {which} micro-batch has"
                raise ValueError(
                    f"with micro_batch {plan.micro_batch} {piece} a single sample, too few for the batch normalisation "
                    f"of {self.model}: choose another micro_batch{' or accumulate' * (plan.accumulate > 1)}"
                )

    def misfit(self, parent: TaskSpec) -> tuple[str, str] | None:
        if not isinstance(parent, ImageTask):
            return "dataset", f"the weights are for arrays, but {self.dataset} has images: create a new job"
        if self.shape != parent.shape:
            field = "dataset" if self.input == parent.input else "input"
            wanted = list(parent.shape)
            return field, f"the weights need an input of {wanted}, not {list(self.shape)}: set input to {wanted}"
        classes = [one.images.classes for one in (parent, self)]
        if classes[0] != classes[1]:
            return "dataset", f"the weights are for {classes[0]} classes, but {self.dataset} has {classes[1]}"
        return None
