"""How a module's passes are computed: the precision."""

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from computeshare.errors import SpecError
from computeshare.jobspec.spec import JobSpec
from computeshare.types import Precision


@dataclass(frozen=True, slots=True)
class Execution:
    """What a job says of how its workers compute forward and backward passes.

    `precision`: with `bfloat16`, forward pass and loss run under `torch.autocast`, which computes what gains from it in
    bfloat16; parameters, buffers and gradients stay float32.
    """

    precision: Precision = "float32"

    def forward(self, device: torch.device) -> AbstractContextManager[object]:
        """The context in which the loss of a batch is computed."""
        if self.precision == "float32":
            return contextlib.nullcontext()
        return torch.autocast(device.type, torch.bfloat16)


PLAIN = Execution()


def execution_of(spec: JobSpec) -> Execution:
    """How a job's workers compute. Raises SpecError: the precision is still to be chosen."""
    if spec.precision == "auto":
        raise SpecError("the job's precision has not been chosen yet")
    return Execution(spec.precision)
