"""Writes a version's model as safetensors, `state_dict` or ONNX. Imports torch only for the last two."""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from computeshare.client import weights
from computeshare.errors import ArtifactError

Format = Literal["safetensors", "state_dict", "onnx"]
SUFFIXES: Mapping[Format, str] = {"safetensors": ".safetensors", "state_dict": ".pt", "onnx": ".onnx"}


def export(spec: Mapping[str, Any], weights_file: Path, path: Path, form: Format) -> None:
    """Write the model of a JobSpec with the weights of a safetensors file to `path`, completely or not at all.

    Raises: ArtifactError: the file cannot be written. PackageMissing: ONNX needs packages that are not installed.
        SpecError, ShapeError: this release cannot build the job's model, or torch cannot export it.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
            _write(spec, weights_file, Path(folder) / path.name, form)
            for file in sorted(Path(folder).iterdir(), reverse=True):  # weights beside a model before the model
                file.replace(path.parent / file.name)
    except OSError as error:
        raise ArtifactError(f"cannot write {path}: {error.strerror or error}") from error


def _write(spec: Mapping[str, Any], weights_file: Path, path: Path, form: Format) -> None:
    if form == "safetensors":
        shutil.copyfile(weights_file, path)
        return
    from computeshare.tasks import exports, trained

    task = trained.task_of_job(spec)
    module = trained.module_of(task, weights.read(weights_file), spec["seed"])
    if form == "onnx":
        exports.save_onnx(task, module, path)
    else:
        exports.save_state_dict(module, path)
