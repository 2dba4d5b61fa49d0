"""Weights by name into a module."""

import pytest
import torch
from torch import nn

from computeshare.errors import ShapeError, SpecError
from computeshare.tasks.trained import load_weights, module_of, task_of_job

JOB = {"dataset": "digits", "model": "mlp"}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def test_a_jobs_module_has_its_weights_and_is_in_eval_mode() -> None:
    task = task_of_job(JOB)
    state = {name: torch.rand_like(tensor) for name, tensor in task.module(0).state_dict().items()}
    module = module_of(task, state, 0)
    assert not module.training and next(module.parameters()).requires_grad
    assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())


def test_a_specification_of_another_release_says_so() -> None:
    with pytest.raises(SpecError, match="this release cannot read"):
        task_of_job({**JOB, "model": "of tomorrow"})


def test_shared_weights_need_one_of_their_names() -> None:
    module = Tied()
    load_weights(module, {"embedding.weight": torch.ones(5, 3)})
    assert module.head.weight.sum() == 15
    with pytest.raises(ShapeError, match=r"embedding.weight is missing, head.weight is missing"):
        load_weights(module, {})


def test_weights_of_another_module_change_nothing_and_are_named() -> None:
    module = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(ShapeError) as caught:
        load_weights(
            module, {**before, "0.weight": torch.zeros(1, 3), "0.bias": torch.ones(1), "2.weight": torch.ones(1)}
        )
    assert str(caught.value) == (
        "these weights do not fit the module: 0.weight is (1, 3), in the module (1, 2), 2.weight is not in the module"
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_the_modules_own_types_are_kept() -> None:
    module = nn.Linear(2, 1).double()
    load_weights(module, {"weight": torch.ones(1, 2), "bias": torch.zeros(1)})
    assert module(torch.ones(1, 2, dtype=torch.float64)).item() == 2
