"""Checkpoints for an evaluator."""

from torch import nn

from computeshare.checkpoints.store import Artifacts
from computeshare.jobspec.spec import JobSpec
from computeshare.tasks import modules
from computeshare.tasks.registry import task_of
from computeshare.types import Token
from tests.support.checkpoints import write_checkpoint


def save(artifacts: Artifacts, spec: JobSpec, version: int) -> Token:
    return save_module(artifacts, task_of(spec).module(version), version)


def save_module(artifacts: Artifacts, module: nn.Module, version: int, frozen: str = "") -> Token:
    layout = modules.layout_of(module)
    weights = modules.weights_of(module, layout)
    token = Token(1, version, layout.digest(weights)[:16])
    write_checkpoint(artifacts, token, layout.views(weights), b"state", layout.digest(weights), 0, 0, (), (), frozen)
    return token


def save_average(artifacts: Artifacts, spec: JobSpec, version: int, like: int) -> Token:
    """A version with a moving average that equals the weights `save` gives version `like`."""
    weights, average = (task_of(spec).module(seed) for seed in (version, like))
    layout = modules.layout_of(weights)
    views = [layout.views(modules.weights_of(module, layout)) for module in (weights, average)]
    token = Token(1, version, "a" * 16)
    artifacts.finish(artifacts.stage(token, views[0], [b"state"], views[1]), "a" * 64, 0, 0)
    return token
