"""Every model of the catalog trains: a step of `sync` and a unit of `local`, at its smallest input."""

import hashlib
import itertools

import numpy as np
import pytest
import torch

from computeshare.jobspec.catalog import catalog
from computeshare.jobspec.spec import JobSpec
from computeshare.tasks.modules import weights_of
from computeshare.tasks.registry import task_of
from computeshare.training.computation import replica_of
from computeshare.training.server_step import ServerStep

PLAIN = {"name": "SGD", "lr": 1e-6}
"""Without state: the largest model has 2.5 GB of weights. At 1e-3 a ResNet-152 on noise diverges in its second step."""
LOCAL_STEPS = {"kind": "local", "replicas": 1, "inner_steps": 2, "outer_momentum": 0.0, "inner_optimizer": PLAIN}
SYNC, LOCAL = {"micro_batches_per_round": 1, "optimizer": PLAIN}, {"strategy": LOCAL_STEPS}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "kind"), list(itertools.product(catalog().models, ("sync", "local"))))
def test_every_model_takes_a_step_at_its_smallest_input(name: str, kind: str) -> None:
    size = catalog().models[name].min_size
    job = {"dataset": "cifar10", "model": name, "input": [3, size, size], "micro_batch": 4, "rounds": 1}
    spec = JobSpec.model_validate(job | (SYNC if kind == "sync" else LOCAL))
    instance = task_of(spec).on_noise(spec.plan.samples)
    server = ServerStep(spec, instance.layout)
    base = server.load(weights_of(instance.module, instance.layout), b"")
    before = hashlib.sha256(base.published.parameters).digest()
    update = replica_of(spec, instance, torch.device("cpu")).compute(0)
    samples = spec.plan.unit_size(0)
    after = server.step(1, base, [(update.vector, update.buffers)], [samples]).published.parameters
    assert np.isfinite(update.loss) and np.isfinite(after).all() and hashlib.sha256(after).digest() != before
