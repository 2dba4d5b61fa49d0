"""A virtual environment with what a wheel requires, taken from the environment of the tests, and nothing else."""

import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def bare_venv(folder: Path, requirements: list[str]) -> Path:
    """A new environment with these requirements and theirs, without pip; its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    for distribution in closure(requirements).values():
        for file in distribution.files or ():
            top = file.parts[0]
            source = Path(str(distribution.locate_file(top)))
            if top in ("..", "__pycache__") or (site / top).exists():
                continue
            if source.suffix == ".dist-info":  # copied: uv does not see a distribution behind a link
                shutil.copytree(source, site / top)
            else:
                (site / top).symlink_to(source)
    return folder / "bin" / "python"


def closure(requirements: list[str]) -> dict[str, metadata.Distribution]:
    """The installed distributions that these requirements need, by their canonical names."""
    found: dict[str, metadata.Distribution] = {}
    seen: set[tuple[str, str]] = set()
    todo = [each for each in map(Requirement, requirements) if _is_needed(each, "")]
    while todo:
        each = todo.pop()
        name = canonicalize_name(each.name)
        asked = {(name, extra) for extra in each.extras | {""}} - seen
        seen |= asked
        if not asked:
            continue
        found[name] = metadata.distribution(name)
        below = map(Requirement, found[name].requires or ())
        todo += [one for one in below if any(_is_needed(one, extra) for _, extra in asked)]
    return found


def _is_needed(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def install(python: Path, wheel: Path) -> None:
    """Install a wheel there, without looking at its requirements."""
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--offline", "--no-deps", "--python"]
    subprocess.run([*command, str(python), str(wheel)], check=True, timeout=60)
