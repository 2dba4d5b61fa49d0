"""Data sets that users add: their names, and the facts with which a job on one is planned. Pure."""

import re
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, StringConstraints, model_validator

from computeshare.jobspec.catalog import DatasetEntry, catalog, dataset_names, normalized_name
from computeshare.jobspec.part import Part
from computeshare.jobspec.tasks.hugging_face import PREFIX, ClassName, Side

DataKind = Literal["images", "text", "arrays", "files"]
KINDS: tuple[DataKind, ...] = get_args(DataKind)
TRAINING_FILES = "train/"
"""Prefix of the paths of the files that a worker needs of images, text and arrays."""
MOST_CLASSES = 20_000
MOST_CHARACTERS = 20_000
"""The most different characters of a text by characters."""
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
_NAME = re.compile(NAME_PATTERN, re.ASCII)
Count = Annotated[int, Field(ge=0, le=2**40)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]


class DatasetSizes(Part):
    """Facts of a data set, found when it is prepared."""

    train: Count = Field(title="Train", description="samples of the training split; text: tokens; files: how many")
    test: Count = Field(title="Test", description="samples of the test split; text: tokens; files: 0")
    shape: tuple[Side, ...] = Field(
        (),
        strict=False,
        max_length=8,
        title="Shape",
        description="of a sample: images [channels, height, width]; arrays: of an input",
    )
    classes: tuple[ClassName, ...] = Field(
        (), strict=False, max_length=MOST_CLASSES, title="Classes", description="their names; empty: no classes"
    )
    mean: tuple[Finite, ...] = Field(
        (),
        strict=False,
        max_length=3,
        title="Mean",
        description="of the training inputs; images: by channel, of 0 to 1",
    )
    std: tuple[Positive, ...] = Field(
        (), strict=False, max_length=3, title="Standard deviation", description="as the mean"
    )
    tokens: Literal["", "characters", "bytes", "tokenizer"] = Field(
        "", title="Tokens", description="what a text is divided into; tokenizer: by the data set's tokenizer.json"
    )
    symbols: int = Field(0, ge=0, le=2**31, title="Symbols", description="different tokens of a text")
    alphabet: str = Field(
        "",
        max_length=MOST_CHARACTERS,
        title="Alphabet",
        description="a text's characters in the order of their numbers, where they are the tokens",
    )


class DatasetFacts(DatasetSizes):
    """Facts of a data set of the user's own; a job is created with them, and is trained on no other data."""

    kind: DataKind = Field(title="Kind")
    bundle: Digest = Field(title="Bundle", description="digest of the prepared files")

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if wrong := _wrong(self):
            raise ValueError(f"{self.kind} need {wrong}")
        return self


def _wrong(facts: DatasetFacts) -> str:
    """The facts that a data set of this kind needs but lacks, as text; empty: none."""
    channels = facts.shape[0] if facts.shape else 0
    match facts.kind:
        case "images":
            if len(facts.shape) != 3 or channels not in (1, 3) or len(facts.classes) < 2:
                return "a shape [1 or 3, height, width] and at least two classes"
            if not len(facts.mean) == len(facts.std) == channels:
                return "a mean and a standard deviation for each channel"
        case "arrays":
            if not facts.shape or not len(facts.mean) == len(facts.std) == 1:
                return "the shape of an input, a mean and a standard deviation"
        case "text":
            if facts.tokens == "" or (facts.tokens == "characters" and len(facts.alphabet) != facts.symbols):
                return "tokens, and for characters their alphabet"
            if facts.symbols < 1:
                return "at least one symbol"
    needs_test = facts.kind != "files"
    return "samples in both splits" if needs_test and not (facts.train and facts.test) else ""


def is_own_name(name: str) -> bool:
    """Whether a data set's name is neither the catalog's nor one of Hugging Face, and may be a user's own."""
    return bool(_NAME.fullmatch(name)) and not taken(name)


def taken(name: str) -> bool:
    """Whether a name, without differences in capitals and hyphens, is the catalog's, or one that no job can use."""
    plain, known = normalized_name(name), catalog()
    others = {*map(normalized_name, known.texts), *known.not_offered}
    return plain in dataset_names() or plain in others or name.startswith(PREFIX)


def excluded(dataset: str) -> dict[str, str]:
    """The JobSpec's fields that mean nothing to a task on this data set, each with the message of an error."""
    names = {}
    if not dataset.startswith(PREFIX):
        names["dataset_args"] = f"data set {dataset} has no arguments: leave dataset_args out"
    if not is_own_name(dataset):
        names["data"] = f"data set {dataset} is not your own: leave data out"
    return names


def check_name(name: str) -> str:
    """The name of a new data set. Raises ValueError: it is malformed, or hides a name of the catalog."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is no name for a data set: use letters, digits, '.', '-' and '_', at most 64, "
            f"beginning with a letter or digit"
        )
    if taken(name):
        raise ValueError(f"{name} is the name of a data set that ComputeShare knows already: choose another name")
    return name


def entry_of(facts: DatasetFacts) -> DatasetEntry:
    """The facts of images in the form of the catalog's."""
    channels, height, width = facts.shape
    return DatasetEntry(
        shape=(channels, height, width),
        classes=len(facts.classes),
        train=facts.train,
        test=facts.test,
        source="your own",
    )
