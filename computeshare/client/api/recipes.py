"""Recipes over REST."""

from typing import TypedDict, cast
from urllib.parse import quote

from computeshare.client.api.models import json_object
from computeshare.client.api.requests import Requests

PATH = "/v1/recipes"


class Recipe(TypedDict):
    """A recipe with its files: their text by path."""

    digest: str
    name: str
    files: dict[str, str]


class Recipes:
    """The recipes of one control plane."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def show(self, digest: str) -> Recipe:
        """A recipe with its files."""
        return cast(Recipe, json_object(self._requests.repeatable("GET", f"{PATH}/{quote(digest, safe='')}")))
