"""Settings of a module's forward and backward passes: precision, compiler, memory format."""

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from computeshare.errors import SpecError
from computeshare.jobspec.spec import JobSpec
from computeshare.types import Precision


@dataclass(frozen=True, slots=True)
class Execution:
    """A job's settings for its workers' forward and backward passes.

    `precision`: with `bfloat16`, forward pass and loss run under `torch.autocast`, which computes what gains from it in
    bfloat16; parameters, buffers and gradients stay float32. `compiled`: by `torch.compile`. `channels_last`: batches,
    parameters and gradients of four dimensions lie in memory in the order of `torch.channels_last`.
    """

    precision: Precision = "float32"
    compiled: bool = False
    channels_last: bool = False

    def forward(self, device: torch.device) -> AbstractContextManager[object]:
        """The context in which the loss of a batch is computed."""
        if self.precision == "float32":
            return contextlib.nullcontext()
        return torch.autocast(device.type, torch.bfloat16)


PLAIN = Execution()


def execution_of(spec: JobSpec, device: torch.device) -> Execution:
    """How a job's workers compute on a device: on a CPU, where they place images channels last in any case, the rest in
    that order would only cost time. Raises SpecError: the precision is still to be chosen.
    """
    if spec.precision == "auto":
        raise SpecError("the job's precision has not been chosen yet")
    return Execution(spec.precision, spec.compile, spec.channels_last and device.type != "cpu")
