"""The list of licences is whole, and has no strict copyleft in it."""

import re
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[3]
TABLE = dict(re.findall(r"^\| ([a-z0-9-]+) \| (.+) \|$", (ROOT / "docs" / "licences.md").read_text(), re.M))
EXTRAS = ("data", "hf", "text", "onnx", "examples")
CUDA = re.compile(r"(nvidia|cuda)-")
"""Prefixes of the packages that torch brings on Linux for graphics cards."""


def licence_of(package: metadata.Distribution) -> str:
    """As the package's own metadata name it: an SPDX expression, else its classifiers, else the free text."""
    about: Any = package.metadata
    classified = [
        line.rpartition(" :: ")[2] for line in about.get_all("Classifier") or [] if line.startswith("License")
    ]
    return about.get("License-Expression") or ", ".join(classified) or (about.get("License") or "").partition("\n")[0]


def used() -> dict[str, str]:
    """Name and licence of all packages that ComputeShare uses when it runs, with those that they use in turn."""
    found: dict[str, str] = {}
    waiting = [("computeshare", extra) for extra in ("", *EXTRAS)]
    seen = set(waiting)
    while waiting:
        name, extra = waiting.pop()
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # of an extra that is not installed here
            continue
        if name != "computeshare" and not CUDA.match(name):
            found[name] = licence_of(package)
        for needed in map(Requirement, package.requires or []):
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                new = {(canonicalize_name(needed.name), one) for one in ("", *needed.extras)} - seen
                seen |= new
                waiting += new
    return found


def test_each_package_that_is_used_is_in_the_list_with_its_licence() -> None:
    missing = {name: licence for name, licence in used().items() if TABLE.get(name) != licence}
    lines = "\n".join(f"| {name} | {licence} |" for name, licence in sorted(missing.items()))
    assert not missing, f"write into docs/licences.md:\n{lines}"


def test_no_licence_asks_for_more_than_lgpl_does() -> None:
    assert len(TABLE) > 50
    strict = {name: licence for name, licence in TABLE.items() if re.search(r"(?<!L)(?<!Lesser )GPL|Affero", licence)}
    assert strict == {}
