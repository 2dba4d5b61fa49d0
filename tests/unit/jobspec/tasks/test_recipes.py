"""A recipe in a JobSpec: what it needs, what it excludes, and the sizes of its job."""

from typing import Any

import pytest
from pydantic import ValidationError

from computeshare.jobspec.spec import JobSpec
from computeshare.jobspec.tasks.recipe_facts import MOST_TENSORS
from computeshare.jobspec.tasks.stored import metric_of, subject_of
from tests.support.recipe_jobs import FACTS, RECIPE, recipe_spec


def test_a_job_of_a_recipe_takes_its_sizes_from_the_facts() -> None:
    spec = recipe_spec(micro_batch=10, micro_batches_per_round=5)
    assert (spec.parameters, spec.rounds_total, spec.bundles) == (16, 2, (FACTS["initial"],))
    layout = spec.task.layout  # type: ignore[attr-defined]
    assert (layout.parameters, layout.buffers, layout.counters) == (16, 4, 1)
    assert (spec.facts.test, spec.facts.metric) == (20, "loss")
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec


def test_sizes_are_unknown_until_the_recipe_was_tried() -> None:
    spec = JobSpec(recipe=RECIPE)
    assert spec.task.needs_facts
    with pytest.raises(ValueError, match="recipe a1a1a1a1 have not been found out yet"):
        _ = spec.bundles


@pytest.mark.parametrize(
    ("given", "field", "told"),
    [
        ({"model": "mlp"}, "model", "leave model or recipe out"),
        ({"dataset": "digits"}, "dataset", "cannot read a built-in data set"),
        ({"input": [3, 8, 8]}, "input", "belongs to the recipe"),
        ({"augment": ["flip"]}, "augment", r"let the recipe's data\(\) do it"),
        ({"recipe": "sha256:0"}, "recipe", "must be sha256: and 64 hex digits .* or package:NAME"),
        ({"recipe": None}, "recipe_facts", "belongs to a recipe"),
        ({"recipe_args": {"no name": 1}}, "recipe_args", "cannot be the name of an argument"),
        ({"recipe_args": {"x": float("inf")}}, "recipe_args", "Out of range float"),
        ({"recipe_args": {"x": "y" * 10_000}}, "recipe_args", "at most 10,000 bytes"),
        ({"stop": {"metric": "accuracy", "at": 0.9}}, "stop.metric", "the recipe's model has no accuracy"),
    ],
)
def test_what_does_not_go_with_a_recipe_is_refused_with_the_field(given: dict[str, Any], field: str, told: str) -> None:
    with pytest.raises(ValidationError, match=told) as refused:
        recipe_spec(**given)
    assert {".".join(map(str, one["loc"])) for one in refused.value.errors()} == {field}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"tensors": []}, "no parameter to train"),
        ({"tensors": FACTS["tensors"][2:]}, "no parameter to train"),
        ({"tensors": [{"name": "w", "shape": [2**30], "kind": "parameter"}]}, "set.*recipe_args|recipe_args"),
        ({"tensors": [{"name": "w", "shape": [-1], "kind": "parameter"}]}, "greater than or equal to 0"),
        ({"tensors": FACTS["tensors"][:1] * (MOST_TENSORS + 1)}, "at most 20000 items"),
        ({"tensors": FACTS["tensors"][:1] * 2}, "two tensors are named 0.weight"),
        ({"initial": "b2"}, "should match pattern"),
    ],
)
def test_facts_that_cannot_be_are_refused(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        recipe_spec(recipe_facts=FACTS | changed)


def test_without_a_recipe_both_data_set_and_model_are_needed() -> None:
    with pytest.raises(ValidationError) as refused:
        JobSpec()
    assert [(one["loc"], one["type"]) for one in refused.value.errors()] == [
        (("dataset",), "missing"),
        (("model",), "missing"),
    ]


def test_a_stored_job_says_what_it_trains_and_compares() -> None:
    document = recipe_spec().model_dump(mode="json")
    assert subject_of(document) == recipe_spec().title == "recipe a1a1a1a1"
    assert metric_of(document) == "loss"
    assert metric_of(document | {"recipe_facts": FACTS | {"metric": "accuracy"}}) == "accuracy"
    assert subject_of({"dataset": "digits", "model": "mlp"}) == "mlp on digits"


def test_a_recipe_by_name_has_the_release_of_its_package_in_its_facts_and_no_other_has() -> None:
    named = recipe_spec(recipe="package:blobs", recipe_facts={**FACTS, "package": "mine 1.0"})
    assert named.title == "recipe blobs"
    for recipe, package in (("package:blobs", ""), (RECIPE, "mine 1.0")):
        with pytest.raises(ValidationError, match="names the release of a recipe package:NAME"):
            recipe_spec(recipe=recipe, recipe_facts={**FACTS, "package": package})
    with pytest.raises(ValidationError, match="must be sha256: and 64 hex digits"):
        recipe_spec(recipe="package:../etc")
