"""Finds the fields in which the specifications of jobs differ. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

FEWEST, MOST = 2, 6
"""The numbers of jobs that can be compared side by side."""


def differences(specs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The dotted fields that differ between specifications, each with its value in every specification.

    A field that a specification does not have is None there. `recipe_facts` is left out: it follows from others; of
    the facts of the user's own data, the digest tells the others.
    """
    flat = [flattened(dict(_compared(spec))) for spec in specs]
    paths = dict.fromkeys(path for one in flat for path in one)
    found = {path: [one.get(path) for one in flat] for path in paths}
    return {path: values for path, values in found.items() if any(value != values[0] for value in values)}


def _compared(spec: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in spec.items():
        if name == "data":
            yield name, value and {"bundle": value.get("bundle")}
        elif name != "recipe_facts":
            yield name, value


def flattened(document: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """The values of nested objects by dotted field; lists are values."""
    found: dict[str, Any] = {}
    for name, value in document.items():
        path = f"{above}{name}"
        found.update(flattened(value, f"{path}.") if isinstance(value, Mapping) and value else {path: value})
    return found
