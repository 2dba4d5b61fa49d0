"""How a module's passes run: precision, memory format, and `torch.compile`, which is imported only when it is used."""

import contextlib
import subprocess
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn

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


def compile_module(module: nn.Module) -> None:
    """Have the module's passes compiled at the first call with each shape.

    Each shape gets code of its own, so that results do not depend on which shapes came before, and nothing is chosen by
    timing; random layers draw the numbers that they draw without a compiler.
    """
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1  # in this process: a pool's processes could outlive a killed worker
    module.compile(dynamic=False, options={"fallback_random": True, "deterministic": True})


def undo(module: nn.Module) -> None:
    """Have the module's passes computed without the compiler again."""
    module._compiled_call_impl = None


def compiler(device: torch.device) -> str:
    """The name and version of the compiler that makes a device's code: with another, results may differ in bits."""
    if device.type == "cuda":
        import triton  # type: ignore[import-untyped,unused-ignore]

        return f"triton {triton.__version__}"
    if device.type == "mps":
        return "metal"
    from torch._inductor.cpp_builder import get_cpp_compiler

    told = subprocess.run([get_cpp_compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    return told.partition("\n")[0]
