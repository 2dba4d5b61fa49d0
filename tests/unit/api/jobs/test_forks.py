"""What a fork changes, and what it cannot: pure."""

from typing import Any

import pytest

from api.jobs.forks import changed, fits_optimizer, misfit
from computeshare.jobspec.spec import JobSpec
from tests.support.recipe_jobs import FACTS, recipe_spec


def spec(**fields: Any) -> JobSpec:
    return JobSpec.model_validate({"dataset": "digits", "model": "mlp", **fields})


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, {}),
        ({"seed": 3}, {"seed": 3}),
        ({"optimizer": {"lr": 0.01}}, {"optimizer": {"name": "SGD", "lr": 0.01, "momentum": 0.9}}),
        ({"optimizer": {"name": "Adam"}}, {"optimizer": {"name": "Adam"}}),
        ({"codec": {"up": "float32"}}, {"codec": {"up": "float32", "down": "float32"}}),
        ({"rounds": 7}, {"rounds": 7, "epochs": None}),
        ({"epochs": 2, "rounds": None}, {"epochs": 2}),
        ({"optimizer": 5}, {"optimizer": 5}),
        ({"rounds": {"a": 1}}, {"rounds": {"a": 1}, "epochs": None}),
    ],
)
def test_what_is_not_changed_stays(changes: dict[str, Any], found: dict[str, Any]) -> None:
    document = spec(epochs=4).model_dump(mode="json")
    before = spec(epochs=4).model_dump(mode="json")
    assert changed(document, changes) == before | found
    assert document == before


def test_what_followed_from_a_strategy_goes_with_it() -> None:
    local = spec(strategy={"kind": "local", "inner_steps": 5, "replicas": 2}).model_dump(mode="json")
    assert JobSpec.model_validate(changed(local, {"seed": 1})).micro_batches_per_round == 10
    assert JobSpec.model_validate(changed(local, {"strategy": {"replicas": 3}})).micro_batches_per_round == 15
    there = changed(spec().model_dump(mode="json"), {"strategy": {"kind": "local", "inner_steps": 7, "replicas": 2}})
    assert JobSpec.model_validate(there).micro_batches_per_round == 14
    with pytest.raises(ValueError, match="rumour"):
        JobSpec.model_validate(changed(local, {"strategy": {"kind": "rumour"}}))
    again = JobSpec.model_validate(changed(local, {"strategy": {"kind": "sync"}}))
    assert (again.micro_batches_per_round, again.optimizer) == (spec().micro_batches_per_round, spec().optimizer)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"seed": 1, "micro_batch": 8, "optimizer": {"name": "Adam"}, "codec": {"down": "float16"}}, None),
        ({"model": "simplenet", "input": [1, 28, 28]}, "model"),
        ({"input": [1, 16, 16]}, "input"),
        ({"dataset": "mnist"}, "dataset"),
        ({"dataset": "mnist", "input": [1, 8, 8]}, None),
    ],
)
def test_weights_fit_the_model_and_the_input_they_are_for(changes: dict[str, Any], field: str | None) -> None:
    found = misfit(spec(), spec(**changes))
    assert (found and found[0]) == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"seed": 5}, None),  # holds out the same samples
        ({"validation": 0.1}, None),
        ({"validation": 0.0}, None),
        ({"validation": 0.3}, "validation"),
        ({"dataset": "mnist", "input": [1, 8, 8], "validation": 0.3}, None),
    ],
)
def test_a_fork_does_not_validate_on_samples_that_its_weights_were_trained_on(
    changes: dict[str, Any], field: str | None
) -> None:
    parent = spec(validation=0.2, seed=4)
    found = misfit(parent, spec(**{"validation": 0.2, "seed": 4} | changes))
    assert (found and found[0]) == field


@pytest.mark.parametrize(
    ("args", "field"), [({"n_layer": 2}, None), ({"n_layer": 3}, "model_args"), ({"dropout": 0.1}, "model_args")]
)
def test_a_language_model_keeps_its_size(args: dict[str, Any], field: str | None) -> None:
    text = {"dataset": "tinyshakespeare", "model": "gpt"}
    found = misfit(spec(**text, model_args={"n_layer": 2}), spec(**text, model_args={"n_layer": 2, **args}))
    assert (found and found[0]) == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"recipe_args": {"rate": 2}, "seed": 5}, None),
        (
            {"recipe": "sha256:" + "00" * 32, "recipe_facts": FACTS | {"train": 70, "initial": "sha256:" + "c" * 64}},
            None,
        ),
        ({"recipe_facts": FACTS | {"tensors": FACTS["tensors"][:1]}}, "recipe"),
        ({"recipe_facts": FACTS | {"frozen": "d" * 64}}, "recipe"),
        ({"recipe": None, "recipe_facts": None, "dataset": "digits", "model": "mlp"}, "recipe"),
    ],
)
def test_a_fork_may_change_the_recipe_as_long_as_the_weights_fit(changes: dict[str, Any], field: str | None) -> None:
    found = misfit(recipe_spec(), recipe_spec(**changes))
    assert (found and found[0]) == field


def test_another_recipe_or_other_arguments_are_to_be_tried_anew() -> None:
    document = recipe_spec(recipe_args={"width": 4, "depth": 2}).model_dump(mode="json")
    assert changed(document, {"seed": 3})["recipe_facts"] is not None
    found = JobSpec.model_validate(changed(document, {"recipe_args": {"width": 8}}))
    assert found.recipe_args == {"width": 8, "depth": 2} and found.task.needs_facts


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({"seed": 1, "codec": {"up": "float32"}}, True),
        ({"micro_batches_per_round": 8}, True),
        ({"lr_scaling": "none"}, True),
        ({"optimizer": {"name": "SGD", "lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}}, True),
        ({"optimizer": {"name": "SGD", "lr": 0.05, "momentum": 0.8}}, False),
        ({"optimizer": {"name": "SGD", "lr": 0.05, "momentum": 0.9, "nesterov": True}}, False),
        ({"decay": "matrices"}, False),
        ({"ema": 0.9}, False),
        ({"optimizer": {"name": "Adam"}}, False),
    ],
)
def test_the_optimizers_state_continues_at_another_rate_and_decay_alone(changes: dict[str, Any], fits: bool) -> None:
    parent = {"lr_scaling": "linear"}
    assert fits_optimizer(spec(**parent), spec(**(parent | changes))) is fits
