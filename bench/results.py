"""Results of long runs: lines of JSON beside the repository's files, each naming the sources that it holds for."""

import hashlib
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RELIABILITY = ROOT / "reliability-results.jsonl"
PRODUCT = ("computeshare/**/*.py", "computeshare/protocol/lua/*.lua", "api/**/*.py", "migrations/**/*.py")
"""What every measurement of the whole depends on."""


def digest(patterns: Iterable[str], salt: str = "") -> str:
    """16 hex digits over the files that match, as they are now."""
    found = hashlib.sha256(salt.encode())
    for path in sorted({path for pattern in patterns for path in ROOT.glob(pattern)}):
        found.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def append(path: Path, entry: dict[str, Any]) -> None:
    """Add a line, with the time."""
    with path.open("a") as log:
        log.write(json.dumps(entry | {"at": int(time.time())}) + "\n")


def load(path: Path) -> list[dict[str, Any]]:
    """Every line there is."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of the values do not exceed: one of them, no interpolation."""
    return sorted(values)[max(0, -(-int(1000 * share * len(values)) // 1000) - 1)]
