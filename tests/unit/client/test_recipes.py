"""A job's recipe on a user's machine: chosen by the user, and the very one that the job trains."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from computeshare.bundles.store import BundleStore
from computeshare.client.recipes import JobRecipe, job_recipe, task_of, usage_of
from computeshare.errors import BundleError, RecipeError, SpecError
from computeshare.jobspec.spec import JobSpec
from computeshare.jobspec.tasks.recipe_facts import FROZEN, INITIAL
from computeshare.tasks.modules import frozen_digest
from computeshare.tasks.recipes.bundle import Bundle
from tests.support.recipe_jobs import recipe_spec, stored_facts

TEXT = """
from layers import width
from torch import nn

def model():
    module = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2))
    module[0].requires_grad_(False)
    return module

def data(split, folder):
    return []
"""


class Plane:
    """A control plane's recipes and bundles, as a client sees them."""

    def __init__(self, folder: Path) -> None:
        self.store, self.sent = BundleStore(folder / "there"), 0
        self.recipe: Bundle | None = None
        self.recipes: Any = SimpleNamespace(show=lambda _: {"files": dict(self.recipe.files)} if self.recipe else {})
        self.bundles = self

    def show(self, digest: str) -> dict[str, Any]:
        return {"files": [one.model_dump() for one in self.store.manifest(digest).files]}

    def piece(self, digest: str, piece: str) -> bytes:
        self.sent += 1
        return self.store.piece(digest, piece)


@pytest.fixture
def plane(tmp_path: Path) -> Plane:
    return Plane(tmp_path)


def job(plane: Plane, width: int = 4) -> tuple[JobSpec, Bundle, Any]:
    recipe = Bundle({"recipe.py": TEXT, "layers.py": f"width = {width}"})
    plane.recipe = recipe
    module = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Linear(width, 2))
    module[0].requires_grad_(False)
    return recipe_spec(recipe=recipe.digest, recipe_facts=stored_facts(module, plane.store)), recipe, module


def chosen(plane: Any, spec: JobSpec, folder: Path, which: Any) -> JobRecipe:
    return job_recipe(plane, BundleStore(folder / "here"), spec, which, [FROZEN])


@pytest.mark.parametrize("which", ["stored", "own file"])
def test_the_module_of_a_recipe_has_what_was_frozen(plane: Plane, tmp_path: Path, which: str) -> None:
    spec, recipe, module = job(plane)
    recipe.write(tmp_path / "own")
    found = chosen(plane, spec, tmp_path, tmp_path / "own" if which == "own file" else which)
    built = task_of(spec, found, tmp_path / "recipes" / "one").module(spec.seed)
    assert frozen_digest(built) == frozen_digest(module)
    assert not (found.state / INITIAL).exists(), "only what is needed is downloaded"
    sent = plane.sent
    assert chosen(plane, spec, tmp_path, "stored") == found and plane.sent == sent


def test_two_recipes_do_not_take_each_others_modules(plane: Plane, tmp_path: Path) -> None:
    sizes = []
    for width in (4, 5):
        spec, _, _ = job(plane, width)
        found = chosen(plane, spec, tmp_path, "stored")
        task = task_of(spec, found, tmp_path / "recipes" / str(width))
        sizes.append(task.module(0).state_dict()["0.weight"].shape[0])
    assert sizes == [4, 5]
    assert [path for path in sys.path if str(tmp_path) in path] == [str(tmp_path / "recipes" / "5")]


def test_no_code_runs_without_the_users_word_and_no_other_than_the_jobs(plane: Plane, tmp_path: Path) -> None:
    spec, recipe, _ = job(plane)
    with pytest.raises(SpecError, match="is code, which runs here only if you say so"):
        chosen(plane, spec, tmp_path, None)
    changed = Bundle({**recipe.files, "layers.py": "width = 9"})
    changed.write(tmp_path / "changed")
    with pytest.raises(RecipeError, match="is another recipe"):
        chosen(plane, spec, tmp_path, tmp_path / "changed")
    plane.recipe = changed
    with pytest.raises(RecipeError, match="stored is another recipe"):
        chosen(plane, spec, tmp_path, "stored")


def test_a_bundle_under_anothers_name_is_refused(plane: Plane, tmp_path: Path) -> None:
    spec, _, _ = job(plane)
    (tmp_path / "else").write_text("else")
    other = plane.store.add(tmp_path / "else")
    show = plane.show
    plane.show = lambda _: show(other.digest)  # type: ignore[method-assign]
    with pytest.raises(BundleError, match="another bundle"):
        chosen(plane, spec, tmp_path, "stored")


def test_the_card_says_how_to_build_the_model_and_what_is_not_in_the_weights(plane: Plane) -> None:
    spec, _, _ = job(plane)
    usage = usage_of(spec.model_copy(update={"recipe_args": {"width": 8}}))
    assert "module = model(**{'width': 8})" in usage.build and not usage.is_whole
    assert "not trained are not in the weights" in usage.inputs
