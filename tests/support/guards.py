"""Guards of a seam: a look at every module outside a room, for code that depends on what the room alone may know."""

import ast
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
Depends = Callable[[ast.AST], bool]


def offences(source: str, depends: Depends) -> list[str]:
    """The parts of a module's source that depend on it."""
    return [ast.unparse(node) for node in ast.walk(ast.parse(source)) if depends(node)]


def offences_outside(room: str, depends: Depends) -> dict[str, list[str]]:
    """The offences by path of every module of the product outside `computeshare/ROOM`, where there are any."""
    own = ROOT / "computeshare" / room
    packages = (ROOT / package for package in ("api", "bench", "computeshare"))
    paths = [path for package in packages for path in package.rglob("*.py") if own not in path.parents]
    assert len(paths) > 200
    found = {str(path.relative_to(ROOT)): offences(path.read_text(), depends) for path in paths}
    return {path: lines for path, lines in found.items() if lines}
