"""How a job begins: the layout of its weights, version 0, and the digest of what is not trained."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
from torch import nn

from computeshare.bundles.manifest import PIECE_BYTES, FileEntry
from computeshare.bundles.store import BundleStore
from computeshare.errors import BundleError
from computeshare.jobspec.spec import JobSpec
from computeshare.jobspec.tasks.recipe_facts import INITIAL, RecipeFacts
from computeshare.jobspec.tasks.recipes import RecipeTask
from computeshare.tasks import modules
from computeshare.tasks.base import Task
from computeshare.tasks.recipes import state_files
from computeshare.tasks.registry import task_of
from computeshare.tensors.layout import Layout, Weights


class InitialState(Protocol):
    """The beginning of a job. Errors are ComputeShareErrors."""

    @property
    def layout(self) -> Layout: ...

    @property
    def has_frozen(self) -> bool:
        """Whether some parameters are not trained."""

    @property
    def frozen(self) -> str:
        """The digest of the parameters that are not trained, as `modules.frozen_digest`; empty: there are none."""

    def weights(self) -> Weights:
        """Version 0's weights, as a new copy."""


@dataclass(frozen=True)
class BuiltInitialState:
    """The beginning of a job whose model this release builds, from the job's seed."""

    task: Task
    seed: int

    @cached_property
    def _outline(self) -> nn.Module:
        return self.task.outline()

    @cached_property
    def layout(self) -> Layout:
        return modules.layout_of(self._outline)

    @property
    def has_frozen(self) -> bool:
        return modules.has_frozen(self._outline)

    @property
    def frozen(self) -> str:
        return modules.frozen_digest(self.task.module(self.seed))

    def weights(self) -> Weights:
        return modules.weights_of(self.task.module(self.seed), self.layout)


@dataclass(frozen=True)
class RecipeInitialState:
    """The beginning of a recipe's job, as it was found where the job was created: no code of a user's is run for it."""

    facts: RecipeFacts
    bundles: BundleStore

    @cached_property
    def layout(self) -> Layout:
        return self.facts.layout

    @property
    def has_frozen(self) -> bool:
        return bool(self.facts.frozen)

    @property
    def frozen(self) -> str:
        return self.facts.frozen

    def weights(self) -> Weights:
        digest = self.facts.initial
        try:
            folder = self.bundles.open_files(digest, (INITIAL,))
            for entry in self.bundles.manifest(digest).chosen((INITIAL,)):
                _check(folder, entry)
        except (BundleError, OSError) as error:
            raise BundleError(
                f"the job cannot begin, because its initial weights are not here: {error}. "
                "`computeshare jobs create --recipe` uploads them again; then retry this job"
            ) from error
        return state_files.read_initial(folder, self.layout)


def _check(folder: Path, entry: FileEntry) -> None:
    """Raises BundleError: the file's bytes are not those of its pieces; OSError, ValueError."""
    content = np.memmap(folder / entry.path, mode="r").data
    for number, piece in enumerate(entry.pieces):
        start = number * PIECE_BYTES
        if hashlib.sha256(content[start : start + PIECE_BYTES]).hexdigest() != piece:
            raise BundleError(f"{folder / entry.path} is damaged")


def initial_state_of(spec: JobSpec, bundles: BundleStore) -> InitialState:
    """How a job begins."""
    match spec.task:
        case RecipeTask() as recipe:
            return RecipeInitialState(recipe.recipe_facts, bundles)
        case _:
            return BuiltInitialState(task_of(spec), spec.seed)
