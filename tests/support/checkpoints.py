"""Checkpoints for tests to begin with."""

from collections.abc import Mapping
from typing import Any

from computeshare.checkpoints.store import Artifacts, CheckpointManifest
from computeshare.types import Token


def write_checkpoint(
    artifacts: Artifacts, token: Token, tensors: Mapping[str, Any], state: bytes, *about: Any
) -> CheckpointManifest:
    """Write one as a reducer does; `about` is what `Artifacts.finish` takes beside the files."""
    staged = artifacts.stage(token, tensors, [state])
    try:
        return artifacts.finish(staged, *about)
    finally:
        staged.discard()
