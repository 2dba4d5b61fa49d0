"""A sample of many cases, another for each commit; `make chaos` runs them all."""

import functools
import os
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[2]
Case = TypeVar("Case")
WHOLE = os.environ.get("COMPUTESHARE_CASES") == "all"


def of(cases: Sequence[Case], count: int, name: str = "") -> list[Case]:
    """`count` of the cases, in their order, by the commit and `name`."""
    places = random.Random(_commit() + name).sample(range(len(cases)), min(count, len(cases)))
    return [cases[place] for place in sorted(places)]


def seed() -> int:
    """Where seeded cases begin: COMPUTESHARE_SEED, else at another place for each commit."""
    return int(os.environ.get("COMPUTESHARE_SEED") or random.Random(_commit()).randrange(1 << 30))


@functools.cache
def lately_changed(folder: str, commits: int) -> frozenset[str]:
    """Names, without endings, of the files in a folder that the last commits changed; none in a shallow clone."""
    paths = _git("diff", "--name-only", f"HEAD~{commits}", "HEAD", "--", folder)
    return frozenset(Path(path).stem for path in paths.splitlines())


@functools.cache
def _commit() -> str:
    return _git("rev-parse", "HEAD")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout
