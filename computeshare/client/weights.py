"""Weights of a job's versions: downloaded, checked, and cached in a folder of limited size."""

import contextlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open

from computeshare.bundles.store import BundleStore
from computeshare.checkpoints.store import weights_digest
from computeshare.client.api.calls import Client
from computeshare.client.api.models import Checkpoint, Problem
from computeshare.errors import ArtifactError

if TYPE_CHECKING:
    from torch import Tensor


def pick(checkpoints: Sequence[Checkpoint], version: str, job_id: str) -> Checkpoint:
    """Find `latest`, `best` or a number in a list sorted newest first. Raises Problem: there is no such checkpoint."""
    for checkpoint in checkpoints:
        if version in ("latest", str(checkpoint["version"])) or (version == "best" and checkpoint["best"]):
            return checkpoint
    there = ", ".join(str(c["version"]) for c in checkpoints) or "none yet"
    raise Problem(f"job {job_id} has no checkpoint {version}; there are: {there}", 404)


@dataclass(frozen=True, slots=True)
class WeightsCache:
    """A folder of weights files named by digest; above `most_bytes` the least recently used files are deleted."""

    folder: Path
    most_bytes: int

    @property
    def bundles(self) -> BundleStore:
        """The files that jobs name, beside the weights and limited like them."""
        return BundleStore(self.folder / "bundles", self.most_bytes)

    def fetch(self, client: Client, job_id: str, checkpoint: Checkpoint) -> Path:
        """The path of a version's weights file, downloaded unless it is cached, with its digest checked.

        Raises: ArtifactError: the file cannot be written, or differs from the one that the control plane announced.
        """
        sha256 = checkpoint["sha256"]
        if not re.fullmatch(r"[0-9a-f]{64}", sha256):
            raise ArtifactError(f"{client.url} names no sha256 of version {checkpoint['version']}")
        path = self.folder / f"{sha256}.safetensors"
        if not _is_whole(path, sha256):
            self._make()
            if client.download(job_id, checkpoint["version"], path) != sha256:
                path.unlink(missing_ok=True)
                raise ArtifactError(f"version {checkpoint['version']} of job {job_id} has changed: try again")
        with contextlib.suppress(OSError):  # a read-only folder is a cache, too
            os.utime(path)
            self._trim(path)
        return path

    def _make(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArtifactError(
                f"cannot keep weights in {self.folder}: {error.strerror or error}; "
                "name another folder by ComputeShare(cache=...)"
            ) from error

    def _trim(self, newest: Path) -> None:
        """Delete the least recently used files until the rest fits; `newest` stays whatever its size."""
        files = [(path, path.stat()) for path in self.folder.glob("*.safetensors") if path != newest]
        room = self.most_bytes - newest.stat().st_size
        for path, found in sorted(files, key=lambda file: file[1].st_mtime, reverse=True):
            room -= found.st_size
            if room < 0:
                path.unlink(missing_ok=True)


def read(path: Path) -> "dict[str, Tensor]":
    """The tensors of a weights file on the CPU, in the order of the model's `state_dict`."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in json.loads(file.metadata()["order"])}


def _is_whole(path: Path, sha256: str) -> bool:
    try:
        return weights_digest(path) == sha256
    except ArtifactError:
        return False
