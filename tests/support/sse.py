"""Server-sent events, read from lines."""

import json
from collections.abc import Iterator
from typing import Any


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The stream's events as a browser would read them."""
    event: dict[str, Any] = {}
    for line in lines:
        if not line:
            if "data" in event:
                yield event
            event = {}
        elif not line.startswith(":"):
            name, _, value = line.partition(": ")
            event[name] = json.loads(value) if name == "data" else value
