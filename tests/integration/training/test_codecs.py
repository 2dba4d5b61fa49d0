"""After equal samples MNIST is learned as well whatever codec updates travel with, thanks to error feedback."""

import functools
from pathlib import Path

import numpy as np
import pytest
import torch

from computeshare.codecs.messages import UpdateEncoder, decode_update, feedback_of
from computeshare.codecs.registry import CODECS
from computeshare.jobspec.spec import JobSpec
from computeshare.tasks.images.datasets.definitions import SPLITS
from computeshare.tasks.metrics import score
from computeshare.tasks.modules import weights_of
from computeshare.tasks.registry import task_of
from computeshare.training.replica import Replica
from computeshare.training.server_step import ServerStep

pytestmark = pytest.mark.usefixtures("one_thread")
ROUNDS = 1875  # two epochs
LAST = range(1500, ROUNDS + 1, 75)
"""The versions whose mean accuracy is compared: that of a single one is a matter of luck."""
SPEC = JobSpec.model_validate(
    {
        "dataset": "mnist",
        "model": "lenet5",
        "micro_batch": 64,
        "micro_batches_per_round": 1,
        "rounds": ROUNDS,
        "optimizer": {"name": "SGD", "lr": 0.02, "momentum": 0.9},
    }
)


@functools.cache
def accuracy(folder: Path, codec: str, fed_back: bool = True) -> float:
    """What a job with one worker reaches, without the processes."""
    instance, judge = (task_of(SPEC).instance(SPEC.seed, part, folder) for part in SPLITS)
    layout, up = instance.layout, CODECS[codec]
    server_step = ServerStep(SPEC, layout)
    encoder = UpdateEncoder(up, layout, feedback_of(up, layout) if fed_back else None)
    model = server_step.load(weights_of(instance.module, layout), b"")
    replica = Replica(instance, SPEC.plan, torch.device("cpu"))
    reached = []
    for version in range(1, ROUNDS + 1):
        unit = version - 1
        replica.load(model.published)
        update = replica.compute(unit)
        message = encoder.whole(update.vector, update.buffers, SPEC.plan.generator_seed(unit))
        model = server_step.step(version, model, [decode_update(up, message, layout)], [SPEC.plan.size(unit)])
        if version in LAST:
            reached.append(score(judge, model.published).metrics["accuracy"])
    return float(np.mean(reached))


@pytest.mark.long
@pytest.mark.parametrize("codec", ["float16", "int8", "int4", "topk", "lowrank4"])
def test_a_lossy_codec_reaches_the_accuracy_of_full_precision(mnist_dir: Path, codec: str) -> None:
    assert accuracy(mnist_dir, codec) >= accuracy(mnist_dir, "float32") - 0.005  # other machines have other luck


@pytest.mark.long
def test_the_sparse_codec_does_not_without_error_feedback(mnist_dir: Path) -> None:
    assert accuracy(mnist_dir, "topk", fed_back=False) < accuracy(mnist_dir, "float32") - 0.01
