"""Models are learned as well whatever codec updates travel with, thanks to error feedback."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.support.small_gpt import ADAMW, GPT
from computeshare.codecs.messages import UpdateEncoder, decode_update, feedback_of
from computeshare.codecs.registry import CODECS
from computeshare.jobspec.spec import JobSpec
from computeshare.tasks.metrics import score
from computeshare.tasks.modules import weights_of
from computeshare.tasks.registry import task_of
from computeshare.tensors.layout import Weights
from computeshare.training.replica import Replica
from computeshare.training.server_step import ServerStep

pytestmark = pytest.mark.usefixtures("one_thread")
ROUNDS = 1875  # two epochs
LAST = range(1500, ROUNDS + 1, 75)
"""The versions whose mean accuracy is compared: that of a single one is a matter of luck."""
LENET: dict[str, Any] = {
    "dataset": "mnist",
    "model": "lenet5",
    "micro_batch": 64,
    "micro_batches_per_round": 1,
    "rounds": ROUNDS,
    "optimizer": {"name": "SGD", "lr": 0.02, "momentum": 0.9},
}


def versions(spec: JobSpec, folder: Path, fed_back: bool = True) -> Iterator[tuple[int, Weights]]:
    """The versions of a job with one worker, without the processes."""
    instance = task_of(spec).instance(spec.seed, "train", folder)
    layout, up = instance.layout, CODECS[spec.codecs.up]
    server_step = ServerStep(spec, layout)
    encoder = UpdateEncoder(up, layout, feedback_of(up, layout) if fed_back else None)
    model = server_step.publish_whole(server_step.load(weights_of(instance.module, layout), b""))[1]
    replica = Replica(instance, spec.plan, torch.device("cpu"))
    for version in range(1, spec.rounds_total + 1):
        unit = version - 1
        replica.load(model.published)
        update = replica.compute(unit)
        message = encoder.whole(update.vector, update.buffers, spec.plan.generator_seed(unit))
        model = server_step.step(version, model, [decode_update(up, message, layout)], [spec.plan.size(unit)])
        yield version, model.published


@functools.cache
def accuracy(folder: Path, up: str, down: str = "float32", fed_back: bool = True) -> float:
    """The accuracy on MNIST that a job reaches."""
    spec = JobSpec.model_validate({**LENET, "codec": {"up": up, "down": down}})
    judge = task_of(spec).instance(spec.seed, "test", folder)
    found = versions(spec, folder, fed_back)
    return float(np.mean([score(judge, one).metrics["accuracy"] for version, one in found if version in LAST]))


@pytest.mark.long
@pytest.mark.parametrize("codec", ["float16", "int8", "int4", "topk", "lowrank4"])
def test_a_lossy_codec_reaches_the_accuracy_of_full_precision(mnist_dir: Path, codec: str) -> None:
    assert accuracy(mnist_dir, codec) >= accuracy(mnist_dir, "float32") - 0.005  # other machines have other luck


@pytest.mark.long
@pytest.mark.parametrize(("up", "down"), [("int4", "int4"), ("int4", "lowrank8"), ("lowrank4", "lowrank4")])
def test_so_do_lossy_codecs_both_ways(mnist_dir: Path, up: str, down: str) -> None:
    assert accuracy(mnist_dir, up, down) >= accuracy(mnist_dir, "float32") - 0.005


@pytest.mark.long
def test_the_sparse_codec_does_not_without_error_feedback(mnist_dir: Path) -> None:
    assert accuracy(mnist_dir, "topk", fed_back=False) < accuracy(mnist_dir, "float32") - 0.01


@pytest.mark.slow
def test_a_language_model_learns_in_a_few_rounds_of_low_rank(shakespeare_dir: Path) -> None:
    document = {**GPT, "micro_batch": 12, "micro_batches_per_round": 1, "rounds": 40, "optimizer": ADAMW}
    spec = JobSpec.model_validate({**document, "codec": {"up": "lowrank4", "down": "lowrank4"}})
    *_, (_, last) = versions(spec, shakespeare_dir)
    loss = score(task_of(spec).instance(spec.seed, "test", shakespeare_dir), last).loss
    assert loss < 3, loss  # of 65 characters, a guess has 4.17
