import pytest
from pydantic import ValidationError

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
