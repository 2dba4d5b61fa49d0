"""The description of a trained model's use: its inputs and its outputs. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    """A description of how to use a model.

    Args:
        pipeline: Hugging Face's name for what it does.
        inputs: its inputs and outputs, in sentences.
        build: Python code that builds its module as `module`; empty: there is none without the job.
        is_whole: whether a version's weights are all of the module's state.
        is_plain: whether that code imports torch and torchvision alone.
    """

    pipeline: str
    inputs: str
    build: str = ""
    is_whole: bool = True
    is_plain: bool = False


@dataclass(frozen=True, slots=True)
class Guess:
    """A class, its name (None: the data set has none), and its probability."""

    index: int
    name: str | None
    probability: float
