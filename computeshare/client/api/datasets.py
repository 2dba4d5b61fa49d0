"""Users' data sets over REST."""

from collections.abc import Mapping
from typing import Any, TypedDict, cast
from urllib.parse import quote

from computeshare.client.api.models import items, json_object
from computeshare.client.api.requests import Requests

PATH = "/v1/datasets"


class Dataset(TypedDict):
    """A data set: its kind, the digest and size of its prepared files, what is known of it, and who uses it."""

    name: str
    kind: str
    bundle: str
    facts: dict[str, Any]
    bytes: int
    jobs: list[str]
    created_at: str


class DatasetCalls:
    """The data sets of one control plane."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def create(self, name: str, kind: str, bundle: str, facts: Mapping[str, Any]) -> Dataset:
        """Add a data set whose prepared files were uploaded."""
        body = {"name": name, "kind": kind, "bundle": bundle, "facts": dict(facts)}
        return cast(Dataset, json_object(self._requests.repeatable("POST", PATH, json=body)))

    def list(self) -> list[Dataset]:
        """All data sets, by name."""
        return cast(list[Dataset], items(self._requests.repeatable("GET", PATH))[0])

    def show(self, name: str) -> Dataset:
        """One data set."""
        return cast(Dataset, json_object(self._requests.repeatable("GET", _path(name))))

    def picture(self, name: str, split: str, index: int) -> bytes:
        """An image of a data set, as a small PNG; `split` is `train` or `test`."""
        return self._requests.repeatable("GET", f"{_path(name)}/samples/{split}/{index}").content

    def remove(self, name: str) -> None:
        """Remove a data set."""
        self._requests.once("DELETE", _path(name))


def _path(name: str) -> str:
    return f"{PATH}/{quote(name, safe='')}"
