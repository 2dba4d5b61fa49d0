"""Writes a trained module as a `state_dict` file or as ONNX."""

import importlib.util
from pathlib import Path

import numpy as np
import torch
from torch import nn

from computeshare.errors import PackageMissing, SpecError
from computeshare.tasks.base import Task

ONNX_PACKAGES = ("onnx", "onnxscript")
SINGLE_FILE_BYTES = 1_900_000_000
"""The largest weights, in bytes, inside an ONNX file (its limit is 2 GiB); larger ones go into a second file."""


def save_state_dict(module: nn.Module, path: Path) -> None:
    """Write the module's `state_dict` to a file that `torch.load(path, weights_only=True)` reads."""
    torch.save(module.state_dict(), path)


def save_onnx(task: Task, module: nn.Module, path: Path) -> None:
    """Write the module as an ONNX graph with one input, `input`, and one output, `output`; the batch size is free.

    Weights of more than `SINGLE_FILE_BYTES` go into a second file, named like the first with `.data` added.
    Raises: PackageMissing: the exporter needs packages that are not installed. SpecError: torch cannot export it.
    """
    lacking = [name for name in ONNX_PACKAGES if importlib.util.find_spec(name) is None]
    if lacking:
        raise PackageMissing(f"ONNX needs {' and '.join(lacking)}: pip install 'computeshare[onnx]'")
    batch = task.noise(2, seed=0).batch(np.arange(2))  # torch.export would take a batch of 1 for a constant
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        raise SpecError(f"{task.name} has samples that are no pairs of an input and a target: export the state_dict")
    inputs, _ = batch
    size = sum(tensor.nbytes for tensor in module.state_dict().values())
    try:
        torch.onnx.export(
            module,
            (inputs,),
            path,
            dynamo=True,
            verbose=False,
            external_data=size > SINGLE_FILE_BYTES,
            input_names=["input"],
            output_names=["output"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
        )
    except torch.onnx.OnnxExporterError as error:
        raise SpecError(f"torch {torch.__version__} cannot export {task.name} to ONNX: {error}") from error
