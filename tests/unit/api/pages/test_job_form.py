"""The form for a new job, and what it makes."""

import pytest

from api.pages import job_form
from api.pages.job_form import CHOSEN, CODEC, MORE, STRATEGY
from computeshare.jobspec.spec import JobSpec
from computeshare.strategies.registry import KINDS
from tests.support.recipe_jobs import recipe_spec


def test_the_form_as_it_is_first_shown_makes_a_job() -> None:
    found = job_form.filled(job_form.of_defaults())
    assert not found.errors
    assert found.spec == JobSpec(dataset="digits", model="mlp", epochs=5)


SPECS = {
    "sync": {"dataset": "mnist", "model": "lenet5", "rounds": 500, "name": 'a "name"', "strategy": {"max_norm": 1.0}},
    "adam": {"dataset": "mnist", "model": "simplenet", "epochs": 2, "optimizer": {"name": "Adam", "betas": [0.8, 0.9]}},
    "local": {"dataset": "mnist", "model": "lenet5", "epochs": 3, "codec": "auto", "strategy": {"kind": "local"}},
    "inner": {
        "dataset": "digits",
        "model": "mlp",
        "strategy": {"kind": "local", "inner_optimizer": {"name": "SGD", "lr": 0.1, "nesterov": True, "momentum": 0.9}},
    },
    "async": {"dataset": "digits", "model": "mlp", "strategy": {"kind": "async", "buffer": 3}, "codec": {"up": "topk"}},
    "text": {
        "dataset": "tinyshakespeare",
        "model": "gpt",
        "model_args": {"n_layer": 2, "dropout": 0.5},
        "stop": {"metric": "loss", "at": 1, "patience": 3},
    },
    "choosy": {
        "dataset": "digits",
        "model": "mlp",
        "requires": {"memory": "8GB", "labels": {"room": "attic"}},
        "prefers": {"device": "cuda"},
    },
    "augmented": {"dataset": "cifar10", "model": "resnet20", "augment": ["flip", "crop"], "stop": {"patience": 5}},
    "input": {
        "dataset": "mnist",
        "model": "resnet18",
        "input": [3, 32, 32],
        "seed": 7,
        "workers": {"min": 2, "max": 3},
    },
}


@pytest.mark.parametrize("name", SPECS)
def test_a_clone_asks_for_the_same_job_again(name: str) -> None:
    spec = JobSpec.model_validate(SPECS[name])
    found = job_form.filled(job_form.of_spec(spec.model_dump(mode="json")))
    assert not found.errors
    assert found.spec == spec


RECIPE = "sha256:" + "a1" * 32


def test_a_chosen_recipe_takes_the_place_of_the_model_and_of_a_built_in_data_set() -> None:
    values = job_form.of_defaults() | {"recipe": RECIPE, "recipe_args": "width=128\nkind = wide\n\nsizes=[1, 2]"}
    values |= {"augment": "flip"}
    found = job_form.filled(values)
    assert found.spec == JobSpec(recipe=RECIPE, recipe_args={"width": 128, "kind": "wide", "sizes": [1, 2]}, epochs=5)
    own = job_form.filled(values | {"dataset": "birds"})
    assert own.spec and (own.spec.dataset, own.spec.model) == ("birds", None)
    assert "write NAME=VALUE" in job_form.filled(values | {"recipe_args": "width"}).errors["recipe_args"]


def test_a_clone_of_a_recipes_job_has_its_arguments_and_is_tried_anew() -> None:
    arguments = {"width": 128, "kind": "wide", "sizes": [1, 2]}
    spec = recipe_spec(recipe_args=arguments, rounds=7)
    values = job_form.of_spec(spec.model_dump(mode="json"))
    assert values["recipe_args"] == 'width=128\nkind="wide"\nsizes=[1, 2]'
    found = job_form.filled(values)
    assert found.spec == spec.model_copy(update={"recipe_facts": None})


@pytest.mark.parametrize("kind", [*KINDS])
def test_a_strategy_that_is_chosen_has_its_own_defaults(kind: str) -> None:
    found = job_form.filled(job_form.of_defaults() | {STRATEGY: kind})
    assert found.spec and found.spec.strategy == KINDS[kind]()


def test_fields_of_other_strategies_and_of_other_optimizers_are_left_out() -> None:
    values = job_form.of_defaults() | {STRATEGY: "async", "optimizer.name": "Adam", "optimizer.lr": "0.001"}
    found = job_form.filled(values)
    assert found.spec is not None
    assert "inner_steps" not in found.document["strategy"]
    assert "momentum" not in found.document["optimizer"]


def test_fields_of_a_language_model_are_left_out_for_a_classifier() -> None:
    values = job_form.of_defaults()
    assert values["model_args.n_layer"] == "4"
    assert job_form.filled(values | {"model_args.n_layer": "3"}).document.keys().isdisjoint({"model_args", "stop"})
    texts = {"dataset": "tinyshakespeare", "model": "gpt", "model_args.n_layer": "3"}
    found = job_form.filled(values | texts)
    assert found.spec and found.spec.model_args and found.spec.model_args.n_layer == 3


def test_what_is_wrong_with_an_object_or_in_a_list_is_told_at_its_field() -> None:
    errors = job_form.filled(job_form.of_defaults() | {"stop.at": "0.9"}).errors
    assert errors.keys() == {"stop.metric"} and "stop needs metric and at together" in errors["stop.metric"]
    unknown = job_form.filled(job_form.of_defaults() | {"augment": "crop, blur"}).errors
    assert unknown == {"augment": "must be 'crop', 'flip' or 'randaugment'"}


def test_every_wrong_field_is_named_with_what_is_wrong() -> None:
    values = {"dataset": "digits", "model": "lenet6", "epochs": "many", "micro_batch": "0", MORE: "[1]", "seed": "nan"}
    errors = job_form.filled(values).errors
    assert "not a number" in errors["epochs"] and "not a number" in errors["seed"]
    assert "lenet6" in errors["model"]
    assert errors["micro_batch"] == "must be at least 1"
    assert "a JSON object" in errors[MORE]


def test_too_many_workers_to_wait_for_are_told_at_their_field() -> None:
    errors = job_form.filled(job_form.of_defaults() | {"workers.min": "5"}).errors
    assert errors.keys() == {"workers.min"} and "must be at most 4" in errors["workers.min"]


def test_what_is_wrong_with_the_whole_is_said_of_the_whole() -> None:
    values = {"dataset": "digits", "model": "lenet5", "epochs": "1"}
    assert "needs an input of at least" in job_form.filled(values).errors[""]
    assert "not both" in job_form.filled(job_form.of_defaults() | {"rounds": "5"}).errors[""]
    assert "momentom" in job_form.filled(job_form.of_defaults() | {MORE: '{"momentom": 1}'}).errors[""]


def test_chosen_codecs_count_only_where_they_are_not_left_to_measurement() -> None:
    values = job_form.of_defaults() | {"codec.up": "int8"}
    assert job_form.filled(values).document[CODEC] == {"up": "int8", "down": "float32"}
    assert values[CODEC] == CHOSEN
    assert job_form.filled(values | {CODEC: "auto"}).document[CODEC] == "auto"


@pytest.mark.parametrize("depth", [900, 100_000])
def test_what_is_nested_too_deep_is_said(depth: int) -> None:
    more = f'{{"strategy": {"[" * depth}{"]" * depth}}}'
    assert job_form.filled(job_form.of_defaults() | {MORE: more}).errors


def test_needs_that_are_none_are_told_at_their_input() -> None:
    found = job_form.filled(job_form.of_defaults() | {"requires": "memory=8GB, attic", "prefers": "memory=much"})
    assert "give memory=8GB" in found.errors["requires"] and "8GB" in found.errors["prefers"]
