"""Data sets of Hugging Face in a JobSpec: their arguments, and the sizes with which a job is planned. Pure."""

import re
from typing import Annotated

from pydantic import Field, StringConstraints

from computeshare.jobspec.catalog import DatasetEntry
from computeshare.jobspec.part import Part

PREFIX = "hf:"
_NAME = re.compile(r"hf:[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
Side = Annotated[int, Field(ge=1, le=65_536)]
ClassName = Annotated[str, StringConstraints(max_length=200)]


class HubFacts(Part):
    """Facts of a data set, found by the control plane when the job was created; workers train on no other data."""

    revision: str = Field("", max_length=64, title="Revision", description="commit on the Hub; empty: a folder")
    digest: str = Field(
        "",
        pattern=r"^([0-9a-f]{64})?$",
        title="Digest",
        description="sha256 of a folder's images and labels; empty: from the Hub",
    )
    train: int = Field(ge=1, title="Train", description="samples of the training split")
    test: int = Field(ge=1, title="Test", description="samples of the test split")
    shape: tuple[int, Side, Side] = Field(
        strict=False, title="Shape", description="channels, height, width of the first image"
    )
    classes: tuple[ClassName, ...] = Field(
        strict=False, min_length=2, max_length=20_000, title="Classes", description="their names"
    )


class HubArgs(Part):
    """The columns and splits to use of a data set; empty ones are chosen when the job is created."""

    config: str = Field("", max_length=200, description="configuration (subset) on the Hub; default: the default one")
    image: str = Field("", max_length=200, description="column of images; default: the only one")
    label: str = Field("", max_length=200, description="column of classes (ClassLabel); default: the only one")
    train_split: str = Field("", max_length=200, description="default: train")
    test_split: str = Field(
        "", max_length=200, description="default: test or validation; without either, 10 % of the training split"
    )
    facts: HubFacts | None = Field(None, description="found out when the job is created: leave it out")


def is_hub_name(name: str) -> bool:
    """Whether a data set's name is one of Hugging Face: `hf:NAME` or `hf:OWNER/NAME`. Raises ValueError: neither."""
    if not name.startswith(PREFIX):
        return False
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a data set of Hugging Face: give hf:NAME or hf:OWNER/NAME")
    return True


def entry_of(facts: HubFacts) -> DatasetEntry:
    """The facts in the form of the catalog's."""
    sizes = {"train": facts.train, "test": facts.test, "classes": len(facts.classes)}
    return DatasetEntry(shape=facts.shape, source="hugging face", requires=("datasets",), **sizes)
