"""How a job begins: built from its seed, or as it was found where a recipe's job was created."""

from pathlib import Path

import pytest
from torch import nn

from computeshare.bundles.store import BundleStore
from computeshare.errors import BundleError, RecipeError
from computeshare.jobspec.spec import JobSpec
from computeshare.jobspec.tasks.recipe_facts import INITIAL
from computeshare.tasks.initial_state import BuiltInitialState, RecipeInitialState, initial_state_of
from computeshare.tasks.modules import frozen_digest, layout_of, weights_of
from computeshare.tasks.registry import task_of
from tests.support.recipe_jobs import recipe_spec, stored_facts


def module() -> nn.Module:
    built = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    built[0].requires_grad_(False)
    return built


def stored(module: nn.Module, folder: Path) -> RecipeInitialState:
    """The beginning of a job that trains the module, whose files are in a store."""
    store = BundleStore(folder)
    found = initial_state_of(recipe_spec(recipe_facts=stored_facts(module, store)), store)
    assert isinstance(found, RecipeInitialState)
    return found


def test_a_recipes_job_begins_as_it_was_found(tmp_path: Path) -> None:
    began = module()
    state, layout = stored(began, tmp_path), layout_of(began)
    assert state.layout == layout
    assert (state.has_frozen, state.frozen) == (True, frozen_digest(began))
    assert layout.digest(state.weights()) == layout.digest(weights_of(began, layout))


def test_another_job_begins_from_its_seed(tmp_path: Path) -> None:
    spec = JobSpec(dataset="digits", model="mlp", seed=5)
    state = initial_state_of(spec, BundleStore(tmp_path))
    expected = task_of(spec).module(5)
    assert isinstance(state, BuiltInitialState)
    assert state.layout == layout_of(expected) and (state.has_frozen, state.frozen) == (False, "")
    assert state.layout.digest(state.weights()) == state.layout.digest(weights_of(expected, state.layout))


def test_absent_and_damaged_initial_weights_are_told_with_what_to_do(tmp_path: Path) -> None:
    state = stored(module(), tmp_path)
    assert isinstance(state, RecipeInitialState)
    file = state.bundles.open_files(state.facts.initial) / INITIAL
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # still finite, and of the right size
    file.write_bytes(content)
    with pytest.raises(BundleError, match=r"cannot begin.* is damaged.*create --recipe` uploads"):
        state.weights()
    file.unlink()
    with pytest.raises(BundleError, match=r"cannot begin.* is not complete here: .*then retry this job"):
        state.weights()
    state.bundles.remove(state.facts.initial)
    with pytest.raises(BundleError, match=r"cannot begin.* no bundle .* here: "):
        state.weights()


def test_weights_of_another_module_are_refused(tmp_path: Path) -> None:
    state = stored(module(), tmp_path)
    facts = state.facts.model_copy(update={"tensors": state.facts.tensors[1:]})
    with pytest.raises(RecipeError, match=r"initial weights cannot be read: 1\.weight is missing, unknown, or"):
        RecipeInitialState(facts, state.bundles).weights()
