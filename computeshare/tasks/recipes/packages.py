"""Recipes by name, from packages that are installed: entry points of the group `computeshare.tasks`.

Nothing of a package is imported here: that is left to the recipe's process.
"""

import importlib.util
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from computeshare.errors import RecipeUnfit
from computeshare.jobspec.tasks.recipes import PACKAGE, lacking_package

GROUP = "computeshare.tasks"
_STUB = '''"""The recipe {name} of a package that is installed."""

from importlib.metadata import entry_points

(found, *_) = entry_points(group="{group}", name="{name}")
recipe = found.load()
for name in ("model", "data", "loss", "metrics", "pretrained", "predict"):
    if hasattr(recipe, name):
        globals()[name] = getattr(recipe, name)
'''


@dataclass(frozen=True, slots=True)
class Package:
    """A package's recipe: its name, the module with its functions, and the distribution with its version."""

    name: str
    module: str
    release: str


def installed() -> Mapping[str, Package]:
    """The recipes of installed packages, by name."""
    found: dict[str, Package] = {}
    for point in entry_points(group=GROUP):
        if point.dist:
            found.setdefault(point.name, Package(point.name, point.module, f"{point.dist.name} {point.dist.version}"))
    return found


def package_of(recipe: str) -> Package:
    """The package of a recipe such as `package:NAME`. Raises RecipeUnfit: it is not installed."""
    name, found = recipe.removeprefix(PACKAGE), installed()
    if name not in found:
        known = f"there are {', '.join(sorted(found))}" if found else "there is none"
        raise RecipeUnfit(f"no package here has the recipe {name}: {known} (entry points of the group {GROUP})")
    return found[name]


def stub(recipe: str) -> str:
    """The text of a recipe's file that takes its functions from the installed package."""
    return _STUB.format(group=GROUP, name=recipe.removeprefix(PACKAGE))


def check(recipe: str, release: str) -> None:
    """Raises RecipeUnfit: the package is not installed here, or in another version than `release`."""
    if why := lacking_package(recipe, release, {name: one.release for name, one in installed().items()}):
        raise RecipeUnfit(f"this machine {why}")


def folder_of(recipe: str) -> Path | None:
    """The folder from which the package is imported, if it is none of Python's own. Raises RecipeUnfit."""
    package = package_of(recipe)
    spec = importlib.util.find_spec(package.module.partition(".")[0])  # imports nothing: the name has no dot
    places = [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.origin else [])] if spec else []
    if not places:
        raise RecipeUnfit(f"{package.release} names the module {package.module}, which is not there: install it again")
    folder = Path(places[0]).parent
    own = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    return None if folder.resolve() in own else folder
