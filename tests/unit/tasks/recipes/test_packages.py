"""Recipes by name, from packages that are installed."""

import sys
from pathlib import Path

import pytest

from computeshare.errors import RecipeError
from computeshare.jobspec.tasks.recipes import lacking_package, recipe_title
from computeshare.tasks.recipes import bundle, packages
from computeshare.tasks.recipes.functions import load
from tests.support.recipe_packages import install

RECIPE = "package:blobs"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = install("1.2.0", tmp_path)
    monkeypatch.syspath_prepend(folder)
    return folder


def test_an_installed_package_is_found_by_its_entry_point_and_not_imported(site: Path) -> None:
    assert packages.installed()["blobs"] == packages.Package("blobs", "blob_recipes.blobs", "blob-recipes 1.2.0")
    assert packages.folder_of(RECIPE) == site
    assert not [name for name in sys.modules if name.startswith("blob_recipes")]


def test_the_recipe_is_called_by_its_name_and_its_file_takes_the_packages_functions(site: Path, tmp_path: Path) -> None:
    found = bundle.read(Path(RECIPE))
    assert (found.digest, recipe_title(RECIPE)) == (RECIPE, "recipe blobs")
    assert found == bundle.of_package(RECIPE)
    found.write(tmp_path / "recipe")
    functions = load(tmp_path / "recipe")
    assert len(functions.data("test", None)) == 100 and functions.loss is None
    assert [tuple(p.shape) for p in functions.model(width=3).parameters()] == [(3, 4), (3,), (4, 3), (4,)]


def test_another_version_and_none_are_told_with_what_to_install(site: Path) -> None:
    packages.check(RECIPE, "blob-recipes 1.2.0")
    with pytest.raises(RecipeError, match=r"this machine has blob-recipes 1.2.0, and the job needs blob-recipes 1.3"):
        packages.check(RECIPE, "blob-recipes 1.3")
    assert lacking_package(RECIPE, "blob-recipes 1.3", {}) == (
        "has no recipe blobs: install blob-recipes==1.3 there, then start the worker again"
    )
    with pytest.raises(RecipeError, match=r"no package here has the recipe other: there are .*blobs"):
        bundle.read(Path("package:other"))
