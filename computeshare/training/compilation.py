"""Compiles a module's passes with `torch.compile`. Importing this module does not import the compiler."""

import subprocess

import torch
from torch import nn


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
