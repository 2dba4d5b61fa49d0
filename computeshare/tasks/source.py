"""The source of a model, for those who build it without ComputeShare. Imports no torch."""

import ast
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any


def source_of(root: Callable[..., Any]) -> str:
    """The source of a function or class with what it uses of its own module, imports included, in the module's order.

    It runs by itself where the module imports nothing but installed packages.
    """
    source = inspect.getsource(sys.modules[root.__module__])
    statements = ast.parse(source).body
    defined = {name: number for number, node in enumerate(statements) for name in _names(node)}
    needed: set[int] = set()
    left = {root.__name__}
    while left:
        number = defined.get(left.pop())
        if number is not None and number not in needed:
            needed.add(number)
            left |= {node.id for node in ast.walk(statements[number]) if isinstance(node, ast.Name)}
    found = [statements[number] for number in sorted(needed)]
    imports = [ast.unparse(node) for node in found if isinstance(node, ast.Import | ast.ImportFrom)]
    others = [
        ast.get_source_segment(source, node) or ""
        for node in found
        if not isinstance(node, ast.Import | ast.ImportFrom)
    ]
    return re.sub(r"  # type: ignore.*", "", "\n\n\n".join(["\n".join(imports), *others]))


def _names(statement: ast.stmt) -> list[str]:
    """The names that a statement defines in its module."""
    match statement:
        case ast.Import() | ast.ImportFrom():
            return [one.asname or one.name for one in statement.names]
        case ast.FunctionDef() | ast.ClassDef():
            return [statement.name]
        case ast.Assign():
            return [target.id for target in statement.targets if isinstance(target, ast.Name)]
        case _:
            return []
