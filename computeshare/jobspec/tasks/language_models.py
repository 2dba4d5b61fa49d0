"""Language models that a JobSpec may name, and the samples that a text gives them. Pure."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from computeshare.jobspec.controls import DATA, Control
from computeshare.jobspec.part import Part

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
