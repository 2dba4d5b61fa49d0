"""The functions of a recipe, imported from its files, with their errors told by the recipe's own lines."""

import errno
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from computeshare.errors import ComputeShareError, RecipeError, RecipeUnfit
from computeshare.tasks.recipes.bundle import MAIN

CONFINED = "a confined recipe has no network, starts no programs, and uses no files but its own and its data"
_REFUSALS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENETUNREACH, errno.ENOSYS})
"""How systems refuse what a confined process must not do."""
REQUIRED, OPTIONAL = ("model", "data"), ("loss", "metrics", "pretrained", "predict")


@dataclass(frozen=True, slots=True)
class Functions:
    """A recipe's functions, as they are imported from `folder`."""

    folder: Path
    model: Callable[..., Any]
    data: Callable[..., Any]
    loss: Callable[..., Any] | None = None
    metrics: Callable[..., Any] | None = None
    pretrained: Callable[..., Any] | None = None
    predict: Callable[..., Any] | None = None

    def call(self, name: str, /, *arguments: Any, **named: Any) -> Any:
        """Call a function. Raises RecipeError with the line of the recipe that failed, and the cause."""
        with told(self.folder, f"{name}()"):
            return getattr(self, name)(*arguments, **named)

    def taken(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Those of a job's `recipe_args` that a function takes by name; all of them if it has `**`."""
        parameters = inspect.signature(getattr(self, name)).parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return dict(arguments)
        given = [p.name for p in list(parameters.values())[_LEADING[name] :]]
        return {key: value for key, value in arguments.items() if key in given}

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Raises RecipeError: no function takes one of the arguments."""
        taking = [name for name in _LEADING if getattr(self, name)]
        known = {argument for name in taking for argument in self.taken(name, arguments)}
        for argument in arguments:
            if argument not in known:
                told = ", ".join(f"{name}()" for name in taking)
                raise RecipeError(f"none of {told} takes an argument {argument}: mend --arg, or the recipe")


_LEADING = {"model": 0, "data": 2, "pretrained": 1}
"""The functions that take a job's arguments, and the number of their own parameters before those."""


def load(folder: Path) -> Functions:
    """Import the recipe whose files are in `folder`, in a process that serves this recipe alone.

    Runs the recipe's code: call it only where the machine's owner agreed to that. Raises RecipeError.
    """
    sys.path.insert(0, str(folder))  # for good: functions may import when they are called
    with told(folder, "the import"):
        spec = importlib.util.spec_from_file_location("recipe", folder / MAIN)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules["recipe"] = module  # dataclasses look a class's module up by its name
        spec.loader.exec_module(module)
    found = {name: getattr(module, name, None) for name in (*REQUIRED, *OPTIONAL)}
    for name, function in found.items():
        if function is None and name in REQUIRED:
            raise RecipeError(f"{MAIN} defines no function {name}: {_FORMS[name]}")
        if function is not None and not callable(function):
            raise RecipeError(f"{MAIN}: {name} is a {type(function).__name__}, not a function: {_FORMS[name]}")
    return Functions(folder, **found)  # type: ignore[arg-type]


def forget() -> None:
    """Forget the modules of the recipe loaded last, so that another can be loaded in this process."""
    file = getattr(sys.modules.get("recipe"), "__file__", None)
    if not file:
        return
    folder = Path(file).parent
    for name, module in list(sys.modules.items()):
        if _is_in(str(getattr(module, "__file__", None)), folder):
            del sys.modules[name]
    sys.path[:] = [path for path in sys.path if not _is_in(path, folder)]


_FORMS = {
    "model": "define model(**args), which returns a torch.nn.Module",
    "data": "define data(split, folder, **args), which returns a Dataset with a length",
    "loss": "define loss(model, batch), which returns the mean loss over the batch",
    "metrics": "define metrics(model, batch), which returns a dict of sums over the batch",
    "pretrained": "define pretrained(model, **args), which loads weights into the module",
    "predict": "define predict(model, file), which returns a dict of probabilities by class",
}


@contextmanager
def told(folder: Path, doing: str) -> Iterator[None]:
    """Turn a recipe's error within the block into a RecipeError that names the last of the recipe's lines it came
    through; into a RecipeUnfit if the machine lacks a package or memory.
    """
    try:
        yield
    except ComputeShareError:
        raise
    except (Exception, SystemExit) as error:  # whatever the recipe raises
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_in(frame.filename, folder)]
        where = f"{Path(frames[-1].filename).relative_to(folder)}, line {frames[-1].lineno}" if frames else MAIN
        if isinstance(error, SyntaxError) and error.filename and _is_in(error.filename, folder):
            where = f"{Path(error.filename).relative_to(folder)}, line {error.lineno}"
        message = f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}".removesuffix(": ")
        kind = RecipeUnfit if isinstance(error, ImportError) or _lacks_memory(error) else RecipeError
        raise kind(f"{where}: {doing} failed: {message}{_hint(error)}") from error


def _hint(error: BaseException) -> str:
    """A hint to append to an error's message: confinement, a missing package or too little memory; empty: none."""
    if isinstance(error, OSError) and error.errno in _REFUSALS:
        return f" ({CONFINED})"
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f" (install the package that has {error.name.partition('.')[0]} in this machine's Python)"
    return " (more than the memory allowed here)" if _lacks_memory(error) else ""


def _lacks_memory(error: BaseException) -> bool:
    """Whether Python, torch on the CPU or torch on a GPU got no memory."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))
    )


def _is_in(file: str, folder: Path) -> bool:
    return Path(file).is_relative_to(folder)
