import pytest
from pydantic import ValidationError

from api.stored_specs import plan_of
from computeshare.jobspec.documents.differences import differences
from computeshare.jobspec.documents.export import shortened
from computeshare.jobspec.spec import JobSpec
from computeshare.jobspec.tasks.own_data import DatasetFacts, check_name, is_own_name

BUNDLE = "sha256:" + "a" * 64
IMAGES = {
    "kind": "images",
    "bundle": BUNDLE,
    "train": 18,
    "test": 2,
    "shape": [3, 8, 8],
    "classes": ["a", "b"],
    "mean": [0.5] * 3,
    "std": [0.2] * 3,
}
TEXT = {
    "kind": "text",
    "bundle": BUNDLE,
    "train": 90,
    "test": 10,
    "tokens": "characters",
    "symbols": 2,
    "alphabet": "ab",
}
ARRAYS = {"kind": "arrays", "bundle": BUNDLE, "train": 9, "test": 1, "shape": [4], "mean": [0.0], "std": [1.0]}
FILES = {"kind": "files", "bundle": BUNDLE, "train": 3, "test": 0}


@pytest.mark.parametrize(
    "name", ["MNIST", "fashion_mnist", "tiny-shakespeare", "celeba", "hf:one", "a b", "", "-x", "é"]
)
def test_a_name_must_be_plain_and_hide_none_of_the_catalog(name: str) -> None:
    with pytest.raises(ValueError, match=r"is no name|knows already"):
        check_name(name)
    assert not is_own_name(name)


@pytest.mark.parametrize("name", ["birds", "my.photos-2", "MNIST-at-home"])
def test_other_names_are_free(name: str) -> None:
    assert check_name(name) == name
    assert is_own_name(name)


@pytest.mark.parametrize("facts", [IMAGES, TEXT, ARRAYS, FILES])
def test_facts_of_each_kind_survive_json(facts: dict[str, object]) -> None:
    found = DatasetFacts.model_validate(facts)
    assert DatasetFacts.model_validate_json(found.model_dump_json()) == found


@pytest.mark.parametrize(
    "facts",
    [
        IMAGES | {"shape": [4, 8, 8]},
        IMAGES | {"classes": ["a"]},
        IMAGES | {"mean": [0.5]},
        IMAGES | {"test": 0},
        IMAGES | {"std": [0.0] * 3},
        TEXT | {"alphabet": "a"},
        TEXT | {"tokens": "", "alphabet": ""},
        ARRAYS | {"shape": []},
        FILES | {"bundle": "sha256:a"},
    ],
)
def test_facts_that_contradict_their_kind_are_refused(facts: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        DatasetFacts.model_validate(facts)


def spec(data: dict[str, object] | None, **fields: object) -> JobSpec:
    return JobSpec.model_validate({"dataset": "birds", "model": "mlp", "data": data, **fields})


def test_a_job_needs_facts_until_they_are_found() -> None:
    assert spec(None).task.needs_facts
    with pytest.raises(ValueError, match="have not been found out yet"):
        spec(None).facts  # noqa: B018
    found = spec(IMAGES)
    assert (found.facts.train, found.facts.test, found.bundles) == (18, 2, (BUNDLE,))


def test_facts_of_each_kind_give_a_tasks_sizes() -> None:
    text = spec(TEXT, model="gpt", model_args={"block_size": 4, "n_embd": 8, "n_head": 2, "n_layer": 1})
    assert (text.facts.train, text.facts.test, text.facts.metric) == (22, 2, "loss")
    arrays = spec({**ARRAYS, "classes": ["0", "1"]})
    assert (arrays.facts.train, arrays.facts.metric, arrays.bundles) == (9, "accuracy", (BUNDLE,))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"data": FILES}, "for recipes alone"),
        ({"data": TEXT}, "is text: choose gpt"),
        ({"data": IMAGES, "model": "gpt"}, "is no text"),
        ({"data": ARRAYS}, "targets .* are no classes"),
        ({"data": {**ARRAYS, "classes": ["0", "1"]}, "model": "lenet5"}, "takes images, but birds has arrays"),
        ({"data": {**ARRAYS, "classes": ["0", "1"]}, "augment": ["flip"]}, "is for images only"),
        ({"data": IMAGES, "dataset_args": {"image": "x"}}, "has no arguments"),
        ({"data": IMAGES, "dataset": "mnist"}, "is not your own"),
        ({"data": TEXT, "model": "gpt", "model_args": {"block_size": 64}}, r"set model_args\.block_size to 9 or less"),
    ],
)
def test_what_does_not_belong_together_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        spec(**fields)  # type: ignore[arg-type]


def test_weights_fit_data_of_the_same_form_alone() -> None:
    images = spec(IMAGES)
    assert spec({**IMAGES, "bundle": "sha256:" + "b" * 64}).task.misfit(images.task) is None
    assert spec({**IMAGES, "classes": ["a", "b", "c"]}).task.misfit(images.task)
    assert spec({**ARRAYS, "classes": ["a", "b"]}).task.misfit(images.task)
    size = {"model": "gpt", "model_args": {"block_size": 4}}
    assert spec({**TEXT, "alphabet": "xy"}, **size).task.misfit(spec(TEXT, **size).task)


def test_requests_and_comparisons_leave_facts_out() -> None:
    one, two = (
        spec(IMAGES).model_dump(mode="json"),
        spec({**IMAGES, "bundle": "sha256:" + "b" * 64}).model_dump(mode="json"),
    )
    assert "data" not in shortened(one)
    assert list(differences([one, two])) == ["data.bundle"]


def test_a_plan_survives_a_release_that_refuses_the_specification() -> None:
    document = spec(IMAGES).model_dump(mode="json")
    assert plan_of({**document, "model": "of-another-release"}).samples == 18
