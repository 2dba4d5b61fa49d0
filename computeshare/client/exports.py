"""Writes a version's model as safetensors, `state_dict` or ONNX. Imports torch only for the last two."""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from computeshare.client import weights
from computeshare.errors import ArtifactError

if TYPE_CHECKING:
    from computeshare.tasks.base import Task

Format = Literal["safetensors", "state_dict", "onnx"]
SUFFIXES: Mapping[Format, str] = {"safetensors": ".safetensors", "state_dict": ".pt", "onnx": ".onnx"}


def export(task: "Task | None", seed: int, weights_file: Path, path: Path, form: Format) -> None:
    """Write a job's model with the weights of a safetensors file to `path`, completely or not at all.

    Args:
        task: of the job; None for `safetensors`, which does not need it.
        seed: of the job.
    Raises: ArtifactError: the file cannot be written. PackageMissing: ONNX needs packages that are not installed.
        SpecError, ShapeError: this release cannot build the job's model, or torch cannot export it.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
            _write(task, seed, weights_file, Path(folder) / path.name, form)
            for file in sorted(Path(folder).iterdir(), reverse=True):  # weights beside a model before the model
                file.replace(path.parent / file.name)
    except OSError as error:
        raise ArtifactError(f"cannot write {path}: {error.strerror or error}") from error


def _write(task: "Task | None", seed: int, weights_file: Path, path: Path, form: Format) -> None:
    if task is None:
        shutil.copyfile(weights_file, path)
        return
    from computeshare.tasks import exports, trained

    module = trained.module_of(task, weights.read(weights_file), seed)
    if form == "onnx":
        exports.save_onnx(task, module, path)
    else:
        exports.save_state_dict(module, path)
