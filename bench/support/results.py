"""Results of long runs: JSON lines in the repository's folder, each with the digest of the sources it holds for."""

import hashlib
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RELIABILITY = ROOT / "reliability-results.jsonl"
PRODUCT = ("computeshare/**/*.py", "computeshare/protocol/lua/*.lua", "api/**/*.py", "migrations/**/*.py")
"""Patterns of the sources on which every measurement of the whole system depends."""


def digest(patterns: Iterable[str], salt: str = "") -> str:
    """16 hex digits of a hash over the current contents of the matching files."""
    found = hashlib.sha256(salt.encode())
    for path in sorted({path for pattern in patterns for path in ROOT.glob(pattern)}):
        found.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def append(path: Path, entry: dict[str, Any]) -> None:
    """Append an entry as a line, with the time."""
    with path.open("a") as log:
        log.write(json.dumps(entry | {"at": int(time.time())}) + "\n")


def load(path: Path) -> list[dict[str, Any]]:
    """Every entry of the file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def percentile(values: list[float], share: float) -> float:
    """The smallest of the values that is no smaller than the fraction `share` of them; no interpolation."""
    return sorted(values)[max(0, -(-int(1000 * share * len(values)) // 1000) - 1)]
