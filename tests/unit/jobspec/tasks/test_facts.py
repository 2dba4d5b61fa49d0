"""Facts of tasks: samples, parameters, and which of two versions is better."""

import math
from typing import Any

import pytest
from pydantic import ValidationError

from computeshare.jobspec.spec import JobSpec
from computeshare.jobspec.tasks.facts import TaskFacts, goodness, perplexity
from computeshare.jobspec.tasks.language_models import GptArgs

TEXT = {"dataset": "tinyshakespeare", "model": "gpt"}


def test_nanogpts_small_model_has_its_parameters_and_windows() -> None:
    spec = JobSpec.model_validate(TEXT)
    assert spec.model_args == GptArgs(n_layer=4, n_head=4, n_embd=128, block_size=64, dropout=0.0)
    assert spec.facts == TaskFacts(1_003_854 // 64, 111_539 // 64, 804_096, "loss")
    assert spec.plan.samples == spec.facts.train


def test_a_classifiers_facts_are_the_catalogs() -> None:
    facts = JobSpec(dataset="mnist", model="lenet5").facts
    assert facts == TaskFacts(60_000, 10_000, facts.parameters, "accuracy")


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"model": "lenet5"}, "model", "lenet5 classifies images, but tinyshakespeare is text: choose gpt"),
        ({"dataset": "mnist"}, "dataset", "mnist is no text, but model gpt reads text: choose tinyshakespeare"),
        ({"input": [3, 32, 32]}, "input", "leave it out"),
        ({"stop": {"metric": "accuracy", "at": 0.9}}, "stop", "gpt has no accuracy: set metric to loss"),
        ({"augment": ["flip"]}, "augment", "is for images only"),
        ({"dataset": "mnist", "model": "lenet5", "model_args": {}}, "model_args", "lenet5 has no arguments"),
        ({"model_args": {"n_embd": 30, "n_head": 4}}, "model_args", "n_embd .30. must be a multiple of n_head .4."),
        ({"model_args": {"n_layer": 0}}, "model_args", "greater than or equal to 1"),
        ({"model_args": {"width": 3}}, "model_args", "Extra inputs"),
        (
            {"model_args": {"n_layer": 96, "n_embd": 16_384}},
            "",
            "parameters; the limit with SGD is .* model or model_args",
        ),
    ],
)
def test_an_impossible_combination_is_named(changes: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(ValidationError, match=says) as caught:
        JobSpec.model_validate({**TEXT, **changes})
    assert [str(part) for part in caught.value.errors()[0]["loc"][:1]] == ([field] if field else [])


def test_a_stored_specification_is_read_again() -> None:
    spec = JobSpec.model_validate({**TEXT, "model_args": {"n_layer": 2}, "label_smoothing": 0.1})
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
    assert spec.model_args and spec.model_args.n_layer == 2 and spec.model_args.n_embd == 128


def test_more_accuracy_is_better_and_without_one_less_loss() -> None:
    assert goodness({"accuracy": 0.9, "loss": 3.0}) > goodness({"accuracy": 0.8, "loss": 0.1})
    assert goodness({"loss": 1.4}) > goodness({"loss": 1.5}) > goodness({"loss": math.nan}) == goodness({"loss": None})


def test_perplexity_is_the_exponential_of_the_loss() -> None:
    assert perplexity(math.log(65)) == pytest.approx(65)
    assert perplexity(None) is None and perplexity(1e6) is None
