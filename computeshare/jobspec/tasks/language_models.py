"""Language models that a JobSpec may name, and the samples that a text gives them. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from computeshare.jobspec.catalog import catalog
from computeshare.jobspec.controls import DATA, Control
from computeshare.jobspec.part import Part, error_at
from computeshare.jobspec.sampling_plan import Plan
from computeshare.jobspec.tasks.base import TaskSpec
from computeshare.jobspec.tasks.facts import TaskFacts

LANGUAGE_MODELS = ("gpt",)
TRAIN_PERCENT = 90
"""The share of a text, from its beginning, that is the training split; the rest is the test split."""


class GptArgs(Part):
    """The size of a `gpt`; the defaults are nanoGPT's for a CPU."""

    n_layer: Annotated[int, Control(DATA, "--n-layer")] = Field(
        4, ge=1, le=96, title="Layers", description="blocks of attention and perceptron"
    )
    n_head: Annotated[int, Control(DATA, "--n-head")] = Field(
        4, ge=1, le=128, title="Attention heads", description="of each layer"
    )
    n_embd: Annotated[int, Control(DATA, "--n-embd")] = Field(
        128, ge=1, le=16_384, title="Width", description="a multiple of n_head"
    )
    block_size: Annotated[int, Control(DATA, "--block-size")] = Field(
        64, ge=1, le=8192, title="Context", description="characters of a sample"
    )
    dropout: Annotated[float, Control(DATA, "--dropout")] = Field(
        0.0, ge=0, lt=1, title="Dropout", description="share of values that training leaves out"
    )

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd ({self.n_embd}) must be a multiple of n_head ({self.n_head})")
        return self

    def parameters(self, symbols: int) -> int:
        """The model's number of parameters for a vocabulary of `symbols` symbols."""
        width = self.n_embd
        return (symbols + self.block_size + 1) * width + self.n_layer * (12 * width**2 + 2 * width)


def train_characters(characters: int) -> int:
    """The number of characters in a text's training split."""
    return characters * TRAIN_PERCENT // 100


def samples(characters: int, block_size: int) -> int:
    """The number of windows of `block_size` characters in a split, with all targets (one character later)."""
    return max(0, characters - 1) // block_size


@dataclass(frozen=True, slots=True)
class TextTask(TaskSpec):
    """A language model on a text of the catalog."""

    dataset: str
    model: str
    args: GptArgs

    sized_by: ClassVar[str] = "model_args"

    @property
    def excluded(self) -> Mapping[str, str]:
        return {
            "input": "is for images only: leave it out, and set model_args.block_size",
            "augment": "is for images only: leave it out",
            "dataset_args": f"data set {self.dataset} has no arguments: leave dataset_args out",
        }

    @property
    def title(self) -> str:
        return f"{self.model} on {self.dataset}"

    @property
    def facts(self) -> TaskFacts:
        characters = catalog().texts[self.dataset].characters
        train = train_characters(characters)
        sizes = samples(train, self.args.block_size), samples(characters - train, self.args.block_size)
        return TaskFacts(*sizes, self.args.parameters(catalog().texts[self.dataset].symbols), "loss")

    def check_names(self) -> None:
        texts = catalog().texts
        if self.dataset not in texts:
            message = f"{self.dataset} has images, but model {self.model} reads text: choose {', '.join(texts)}"
            raise error_at("JobSpec", "dataset", message)

    def check_sizes(self, plan: Plan) -> None:
        """Do nothing: a language model takes any micro-batch."""

    def misfit(self, parent: TaskSpec) -> tuple[str, str] | None:
        if isinstance(parent, TextTask) and parent.args == self.args:
            return None
        return "model_args", "a fork keeps its parent's model: leave model_args out, or create a new job"
