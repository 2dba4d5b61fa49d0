"""Bundles of files over REST."""

from typing import Any, TypedDict, cast
from urllib.parse import quote

from computeshare.bundles.manifest import Manifest
from computeshare.client.api.models import json_object
from computeshare.client.api.requests import Requests

PATH = "/v1/bundles"


class Bundle(TypedDict):
    """A bundle's digest and size, and the pieces that the control plane lacks."""

    digest: str
    bytes: int
    missing: list[str]


class BundleDetail(Bundle):
    """A bundle with its files: path, size and pieces of each."""

    files: list[dict[str, Any]]


class Bundles:
    """The bundles of one control plane."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def announce(self, manifest: Manifest) -> Bundle:
        """Announce a bundle; the answer names the pieces to `put`."""
        headers = {"Content-Type": "application/json"}
        return cast(
            Bundle, json_object(self._requests.repeatable("POST", PATH, content=manifest.content, headers=headers))
        )

    def show(self, digest: str) -> BundleDetail:
        """A bundle, with its `files`."""
        return cast(BundleDetail, json_object(self._requests.repeatable("GET", _path(digest))))

    def put(self, digest: str, piece: str, data: bytes) -> None:
        """Send a piece's bytes."""
        headers = {"Content-Type": "application/octet-stream"}
        self._requests.repeatable("PUT", _path(digest, piece), content=data, headers=headers)

    def piece(self, digest: str, piece: str) -> bytes:
        """A piece's bytes."""
        return self._requests.repeatable("GET", _path(digest, piece)).content


def _path(digest: str, piece: str | None = None) -> str:
    path = f"{PATH}/{quote(digest, safe='')}"
    return path if piece is None else f"{path}/pieces/{quote(piece, safe='')}"
