"""Rounds through replica and optimizer are plain training."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from computeshare.jobspec.optimizer_spec import OptimizerSpec
from computeshare.jobspec.sampling_plan import Plan
from computeshare.strategies.base import Contributions
from computeshare.strategies.local import LocalStrategy
from computeshare.tasks import modules
from computeshare.tasks.base import TaskInstance
from computeshare.tasks.images import models
from computeshare.tasks.images.classification import ImageClassification, pixel_by_pixel
from computeshare.tasks.images.datasets.splits import ImageSplit, open_split
from computeshare.tasks.metrics import score
from computeshare.tensors.layout import Weights
from computeshare.training.local_replica import LocalReplica
from computeshare.training.optimizers import ServerOptimizer
from computeshare.training.replica import Replica
from computeshare.types import Vector

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]
CPU = torch.device("cpu")
SEEDS = 5
"""Orders of the data that an accuracy is the mean of: on 360 digits one is uncertain by a point."""
MOMENTUM = OptimizerSpec(name="SGD", lr=0.01, momentum=0.9)
TOLERANCE = 1e-5  # at a rate of 0.01; at 0.02 rounding alone can grow to 4e-4, at 0.05 to 2e-2


def instance_of(name: str, module: nn.Module, split: ImageSplit) -> TaskInstance:
    task = ImageClassification("digits", name, split.normalise.shape)
    return TaskInstance(task, module, modules.layout_of(module), split)


def accuracy(name: str, weights: Weights, split: ImageSplit) -> float:
    module = models.build(name, split.normalise.shape, 10, 1)
    return score(instance_of(name, module, split), weights).metrics["accuracy"]


def train(name: str, plan: Plan, split: ImageSplit, rounds: int, optimizer: OptimizerSpec) -> Weights:
    """What a job does, without the processes: each micro-batch apart, their mean stepped on."""
    shape = split.normalise.shape
    module = models.build(name, shape, 10, 0)
    layout = modules.layout_of(module)
    weights = modules.weights_of(module, layout)
    replica, server = Replica(instance_of(name, module, split), plan, CPU), ServerOptimizer(layout, optimizer)
    for version in range(rounds):
        replica.load(weights)
        this = plan.round(version)
        numbers = range(this.first, this.first + this.count)
        updates = [replica.compute(m) for m in numbers]
        gradient = np.average([u.vector for u in updates], axis=0, weights=[plan.size(m) for m in numbers])
        weights = Weights(
            server.step(weights.parameters, gradient.astype(np.float32)), updates[-1].buffers, weights.counters
        )
    return weights


def train_local(
    name: str,
    split: ImageSplit,
    strategy: LocalStrategy,
    epochs: int,
    seed: int,
    harm: Callable[[Vector], Vector] = np.copy,
) -> Weights:
    """What a job of local SGD does, without the processes; `harm` is done to one replica of each round."""
    module = models.build(name, split.normalise.shape, 10, 0)
    layout = modules.layout_of(module)
    weights = modules.weights_of(module, layout)
    steps, replicas = strategy.inner_steps, strategy.replicas
    plan = Plan(seed, len(split), micro_batch=32, micro_batches_per_round=steps * replicas, inner_steps=steps)
    replica = LocalReplica(instance_of(name, module, split), plan, CPU, strategy.inner_optimizer)
    server = ServerOptimizer(layout, strategy.outer_optimizer)
    for version in range(epochs * plan.rounds_per_epoch):
        replica.load(weights)
        units = plan.round(version).units
        updates = [replica.compute(unit) for unit in units]
        about = Contributions([plan.unit_size(unit) for unit in units], workers=replicas)
        sent = [u.vector for u in updates]
        place = version % len(sent)  # an epoch's last round may have fewer units
        sent[place] = harm(sent[place])
        way = strategy.gradient(sent, about)
        weights = Weights(server.step(weights.parameters, way), updates[-1].buffers, weights.counters)
    return weights


def plain(name: str, split: ImageSplit, batches: list[np.ndarray], seed_of: Callable[[int], int]) -> Weights:
    """The loop of every tutorial, on images that lie in memory as ours do: sixty steps make much of a last bit."""
    module = models.build(name, split.normalise.shape, 10, 0).train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    for number, indices in enumerate(batches):
        images, labels = split.batch(indices)
        torch.manual_seed(seed_of(number))
        optimizer.zero_grad()
        functional.cross_entropy(module(pixel_by_pixel(images)), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return modules.weights_of(module, modules.layout_of(module))


def test_sixty_rounds_of_two_micro_batches_are_sixty_plain_steps_of_twice_the_batch(mnist_dir: Path) -> None:
    split = open_split("mnist", "train", mnist_dir, (1, 28, 28))
    plan = Plan(seed=3, samples=len(split), micro_batch=32, micro_batches_per_round=2)
    ours = train("lenet5", plan, split, 60, MOMENTUM)
    batches = [np.concatenate([plan.indices(2 * v), plan.indices(2 * v + 1)]) for v in range(60)]
    expected = plain("lenet5", split, batches, seed_of=lambda _: 0)  # has no dropout
    np.testing.assert_allclose(ours.parameters, expected.parameters, rtol=0, atol=TOLERANCE)

    assert accuracy("lenet5", ours, open_split("mnist", "test", mnist_dir, (1, 28, 28))) > 0.4


def test_sixty_rounds_of_one_micro_batch_are_a_plain_loop_with_the_same_dropout(mnist_dir: Path) -> None:
    split = open_split("mnist", "train", mnist_dir, (1, 28, 28))
    plan = Plan(seed=3, samples=len(split), micro_batch=32, micro_batches_per_round=1)
    ours = train("simplenet", plan, split, 60, MOMENTUM)
    expected = plain("simplenet", split, [plan.indices(m) for m in range(60)], plan.generator_seed)
    np.testing.assert_allclose(ours.parameters, expected.parameters, rtol=0, atol=TOLERANCE)


def test_training_twice_gives_the_same_bits(tmp_path: Path) -> None:
    split = open_split("digits", "train", tmp_path, (3, 16, 16))
    plan = Plan(seed=1, samples=len(split), micro_batch=16, micro_batches_per_round=2)
    first, second = (train("resnet18", plan, split, 2, OptimizerSpec(name="AdamW")) for _ in range(2))
    for kind in ("parameter", "buffer", "counter"):
        assert first.vector(kind).tobytes() == second.vector(kind).tobytes()


def test_the_multilayer_perceptron_learns_the_digits(tmp_path: Path) -> None:
    train_split, test_split = (open_split("digits", s, tmp_path, (1, 8, 8)) for s in ("train", "test"))
    plan = Plan(seed=0, samples=len(train_split), micro_batch=32, micro_batches_per_round=4)
    optimizer = OptimizerSpec(name="SGD", lr=0.05, momentum=0.9)
    weights = train("mlp", plan, train_split, 30 * plan.rounds_per_epoch, optimizer)
    assert accuracy("mlp", weights, test_split) > 0.96


def test_local_sgd_learns_though_one_replica_of_five_is_a_thousandfold_or_turned_round(tmp_path: Path) -> None:
    train_split, test_split = (open_split("digits", s, tmp_path, (1, 8, 8)) for s in ("train", "test"))
    inner = OptimizerSpec(name="SGD", lr=0.05, momentum=0.9)
    plain = LocalStrategy(inner_optimizer=inner, inner_steps=9, replicas=5, outer_lr=1.0, outer_momentum=0.0)
    harms = {"x1000": lambda vector: vector * np.float32(1000), "turned": np.negative}

    def reached(strategy: LocalStrategy, harm: Callable[[Vector], Vector] = np.copy) -> float:
        return accuracy("mlp", train_local("mlp", train_split, strategy, 20, 0, harm), test_split)

    clean = reached(plain)
    assert clean > 0.94 and reached(plain, harms["x1000"]) < 0.5
    for combine in ("median", "trimmed_mean", "huber"):
        robust = plain.model_copy(update={"combine": combine})
        assert all(reached(robust, harm) >= clean - 0.015 for harm in harms.values())


@pytest.mark.long
def test_local_sgd_and_diloco_learn_the_digits_as_synchronous_sgd_does(tmp_path: Path) -> None:
    train_split, test_split = (open_split("digits", s, tmp_path, (1, 8, 8)) for s in ("train", "test"))
    momentum = OptimizerSpec(name="SGD", lr=0.05, momentum=0.9)
    averaged = LocalStrategy(inner_optimizer=momentum, outer_lr=1.0, outer_momentum=0.0)
    diloco = LocalStrategy(inner_optimizer=OptimizerSpec(name="AdamW", lr=2e-3))
    reached: dict[str, list[float]] = {"sync": [], "averaged": [], "diloco": []}
    for seed in range(SEEDS):
        plan = Plan(seed, len(train_split), micro_batch=32, micro_batches_per_round=4)
        trained = {
            "sync": train("mlp", plan, train_split, 30 * plan.rounds_per_epoch, momentum),
            "averaged": train_local("mlp", train_split, averaged, 30, seed),
            "diloco": train_local("mlp", train_split, diloco, 30, seed),
        }
        for name, weights in trained.items():
            reached[name].append(accuracy("mlp", weights, test_split))
    mean = {name: np.mean(each) for name, each in reached.items()}
    assert mean["sync"] > 0.96
    assert mean["averaged"] >= mean["sync"] - 0.01 and mean["diloco"] >= mean["sync"] - 0.01, reached
