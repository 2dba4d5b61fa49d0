"""Recipes over REST."""

from collections.abc import Mapping
from typing import TypedDict, cast
from urllib.parse import quote

from computeshare.client.api.models import items, json_object
from computeshare.client.api.requests import Requests

PATH = "/v1/recipes"


class Recipe(TypedDict):
    """A recipe's digest, name, size, and the number of jobs that train it."""

    digest: str
    name: str
    bytes: int
    created_at: str
    jobs: int


class RecipeDetail(Recipe):
    """A recipe with the text of its files by path."""

    files: dict[str, str]


class Recipes:
    """The recipes of one control plane."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def create(self, files: Mapping[str, str], name: str = "") -> Recipe:
        """Add a recipe; adding it again changes nothing."""
        body = {"files": dict(files), "name": name}
        return cast(Recipe, json_object(self._requests.repeatable("POST", PATH, json=body)))

    def list(self) -> list[Recipe]:
        """All recipes, newest first."""
        return items(self._requests.repeatable("GET", PATH))[0]

    def show(self, digest: str) -> RecipeDetail:
        """A recipe and its files."""
        return cast(RecipeDetail, json_object(self._requests.repeatable("GET", _path(digest))))

    def delete(self, digest: str) -> None:
        """Delete a recipe that no unfinished job trains."""
        self._requests.once("DELETE", _path(digest))


def _path(digest: str) -> str:
    return f"{PATH}/{quote(digest, safe='')}"
