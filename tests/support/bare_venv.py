"""A virtual environment with what a wheel requires, taken from the environment of the tests, and nothing else."""

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
            if top not in ("..", "__pycache__") and not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution.locate_file(top))))
    return folder / "bin" / "python"


def closure(requirements: list[str]) -> dict[str, metadata.Distribution]:
    """The installed distributions that these requirements need, by their canonical names."""
    found: dict[str, metadata.Distribution] = {}
    todo = [Requirement(each) for each in requirements]
    while todo:
        each = todo.pop()
        name = canonicalize_name(each.name)
        extras = each.extras or {""}
        if name in found or not (each.marker is None or each.marker.evaluate({"extra": ""})):
            continue
        found[name] = metadata.distribution(name)
        below = map(Requirement, found[name].requires or ())
        todo += [one for one in below if one.marker is None or any(one.marker.evaluate({"extra": e}) for e in extras)]
    return found


def install(python: Path, wheel: Path) -> None:
    """Install a wheel there, without looking at its requirements."""
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--offline", "--no-deps", "--python"]
    subprocess.run([*command, str(python), str(wheel)], check=True, timeout=60)
