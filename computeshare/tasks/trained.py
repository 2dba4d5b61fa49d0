"""A trained job's task and module, from its specification and a version's weights."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from computeshare.bundles.store import BundleStore
from computeshare.errors import ShapeError, SpecError
from computeshare.jobspec.spec import JobSpec
from computeshare.tasks.base import Task
from computeshare.tasks.modules import is_frozen
from computeshare.tasks.registry import task_of
from computeshare.tasks.usage import Guess


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A job's model with the weights of `version`: the task, and its module on the CPU, in eval mode."""

    version: int
    task: Task
    module: nn.Module

    def guess(self, file: Path, most: int) -> list[Guess]:
        """As `Task.guess`. Raises: InputError, SpecError."""
        return self.task.guess(self.module, file, most)

    def generate(self, prompt: str, temperature: float, seed: int) -> Iterator[str]:
        """As `Task.generate`. Raises: InputError, SpecError."""
        return self.task.generate(self.module, prompt, temperature, seed)


def task_of_job(spec: Mapping[str, Any], bundles: BundleStore | None = None) -> Task:
    """The task of a job, from its specification as REST tells it. Raises SpecError, as `spec_of_job` and `task_of`.

    Args:
        bundles: as for `task_of`.
    """
    return task_of(spec_of_job(spec), bundles)


def spec_of_job(spec: Mapping[str, Any]) -> JobSpec:
    """A specification as REST tells it. Raises SpecError: this release cannot read it."""
    try:
        return JobSpec.model_validate(spec)
    except ValidationError as error:
        raise SpecError(f"this release cannot read the job's specification: {error}") from error


def module_of(task: Task, state: Mapping[str, Tensor], seed: int) -> nn.Module:
    """The task's module with these weights, on the CPU and in eval mode. Raises SpecError, ShapeError.

    Args:
        seed: of the job: parameters that are not trained are built from it.
    """
    module = task.module(seed)
    load_weights(module, state)
    return module.eval()


def load_weights(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy `state` into the module, on the module's device and in its types. A name may be missing if its tensor is
    shared with one that is present, or is a parameter that is not trained.

    Raises: ShapeError: names or shapes differ; the module stays as it was.
    """
    live = module.state_dict(keep_vars=True)
    loaded = {id(tensor) for name, tensor in live.items() if name in state or is_frozen(tensor)}
    wrong = [f"{name} is missing" for name, tensor in live.items() if name not in state and id(tensor) not in loaded]
    for name, tensor in state.items():
        if name not in live:
            wrong.append(f"{name} is not in the module")
        elif live[name].shape != tensor.shape:
            wrong.append(f"{name} is {tuple(tensor.shape)}, in the module {tuple(live[name].shape)}")
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ShapeError(f"these weights do not fit the module: {', '.join(wrong[:3])}{more}")
    with torch.no_grad():
        for name, tensor in state.items():
            live[name].copy_(tensor)
