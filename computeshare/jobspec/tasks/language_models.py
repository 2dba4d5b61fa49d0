"""Language models that a JobSpec may name, and the samples that a text gives them. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from computeshare.jobspec.catalog import catalog
from computeshare.jobspec.controls import DATA, Control
from computeshare.jobspec.part import Part, error_at
from computeshare.jobspec.sampling_plan import Plan
from computeshare.jobspec.tasks import own_data
from computeshare.jobspec.tasks.base import TaskSpec
from computeshare.jobspec.tasks.facts import TaskFacts
from computeshare.jobspec.tasks.own_data import DatasetFacts

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
        64, ge=1, le=8192, title="Context", description="characters (or other tokens) of a sample"
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
    """A language model on a text of the catalog, or of a user's."""

    dataset: str
    model: str
    args: GptArgs
    data: DatasetFacts | None = None

    sized_by: ClassVar[str] = "model_args"

    @property
    def excluded(self) -> Mapping[str, str]:
        return {
            "input": "is for images only: leave it out, and set model_args.block_size",
            "augment": "is for images only: leave it out",
            **own_data.excluded(self.dataset),
        }

    @property
    def title(self) -> str:
        return f"{self.model} on {self.dataset}"

    @property
    def facts(self) -> TaskFacts:
        train, test = (samples(tokens, self.args.block_size) for tokens in self._tokens)
        if not train or not test:
            shorter = min(self._tokens)
            raise ValueError(
                f"a split of {self.dataset} has {shorter:,} tokens, too few for a sample of {self.args.block_size} and "
                f"its last target: set model_args.block_size to {max(1, shorter - 1)} or less"
            )
        return TaskFacts(train, test, self.args.parameters(self._vocabulary[0]), "loss")

    @property
    def needs_facts(self) -> bool:
        return self.data is None and own_data.is_own_name(self.dataset)

    @property
    def bundles(self) -> tuple[str, ...]:
        return (self.data.bundle,) if self.data else ()

    @property
    def _tokens(self) -> tuple[int, int]:
        """Of the training split and of the test split."""
        if self.data:
            return self.data.train, self.data.test
        if self.needs_facts:
            raise ValueError(f"the facts of {self.dataset} have not been found out yet")
        characters = catalog().texts[self.dataset].characters
        train = train_characters(characters)
        return train, characters - train

    @property
    def _vocabulary(self) -> tuple[int, str]:
        """The number of symbols, and what they are."""
        if self.data:
            return self.data.symbols, self.data.alphabet or self.data.tokens
        return catalog().texts[self.dataset].symbols, self.dataset

    def check_names(self) -> None:
        texts = catalog().texts
        if not (self.data.kind == "text" if self.data else self.needs_facts or self.dataset in texts):
            message = f"{self.dataset} is no text, but model {self.model} reads text: choose {', '.join(texts)}"
            raise error_at("JobSpec", "dataset", message)

    def check_sizes(self, plan: Plan) -> None:
        """Do nothing: a language model takes any micro-batch."""

    def misfit(self, parent: TaskSpec) -> tuple[str, str] | None:
        if isinstance(parent, TextTask) and parent.args == self.args:
            if parent._vocabulary == self._vocabulary:
                return None
            return "dataset", f"the weights are for other tokens than those of {self.dataset}: create a new job"
        return "model_args", "a fork keeps its parent's model: leave model_args out, or create a new job"
