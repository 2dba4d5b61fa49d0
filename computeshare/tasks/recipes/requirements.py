"""The packages that a recipe says it needs, in lines such as `# requires: transformers>=5`. Nothing is installed."""

import re
from collections.abc import Iterable, Iterator
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement

from computeshare.errors import RecipeError, RecipeUnfit
from computeshare.tasks.recipes.bundle import Bundle

MOST = 50
_LINE = re.compile(r"^#\s*requires:(.*)$", re.MULTILINE)


def required(bundle: Bundle) -> tuple[str, ...]:
    """The requirements of a recipe's Python files, sorted. Raises RecipeError: a line cannot be understood."""
    found = {str(one) for path, text in bundle.files.items() if path.endswith(".py") for one in _parsed(path, text)}
    if len(found) > MOST:
        raise RecipeError(f"the recipe requires {len(found)} packages: name at most {MOST}")
    return tuple(sorted(found))


def _parsed(path: str, text: str) -> Iterator[Requirement]:
    for line in map(str.strip, _LINE.findall(text)):
        try:
            requirement = Requirement(line)
        except InvalidRequirement as error:
            message = f"{path}: `# requires: {line}` is not understood: write for example `# requires: numpy>=2`"
            raise RecipeError(message) from error
        if requirement.url or len(str(requirement)) > 200:
            raise RecipeError(f"{path}: `# requires: {line}`: give a package's name and versions, and no address")
        yield requirement


def lacking(requirements: Iterable[str]) -> list[str]:
    """The requirements that this Python does not meet, in words such as `transformers>=5 (4.57.1 is installed)`."""
    return [told for one in requirements if (told := _lack(Requirement(one)))]


def _lack(wanted: Requirement) -> str:
    if wanted.marker and not wanted.marker.evaluate():
        return ""
    try:
        version = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return f"{wanted} (not installed)"
    return "" if wanted.specifier.contains(version, prereleases=True) else f"{wanted} ({version} is installed)"


def check(requirements: Iterable[str]) -> None:
    """Raises RecipeUnfit: something is missing here."""
    if missing := lacking(requirements):
        raise RecipeUnfit(
            f"the recipe requires {', '.join(missing)}: install that in this machine's Python, then try again"
        )
