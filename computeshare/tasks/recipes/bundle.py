"""The files of a recipe: read from a disk, checked, named by their digest. Imports neither torch nor the recipe."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from computeshare.bundles.manifest import DIGEST, is_safe_path
from computeshare.errors import RecipeError
from computeshare.jobspec.tasks.recipes import PACKAGE
from computeshare.tasks.recipes import packages

MAIN = "recipe.py"
"""The file that defines the recipe's functions; a recipe of a single file is stored under this name."""
MOST_FILES, MOST_BYTES = 200, 1_000_000
_IGNORED = ("__pycache__", "node_modules", "venv")


@dataclass(frozen=True, slots=True)
class Bundle:
    """A recipe's files: their text by path, with `/` between the parts of a path.

    `package` is the name of a recipe of an installed package (`package:NAME`), whose functions the files take.
    """

    files: Mapping[str, str]
    package: str = ""

    @property
    def digest(self) -> str:
        """The recipe's name everywhere: `package`, or `sha256:` and 64 hex digits over `content`."""
        return self.package or DIGEST + hashlib.sha256(self.content).hexdigest()

    @property
    def content(self) -> bytes:
        """The files as canonical JSON, in UTF-8: sorted by path, without spaces."""
        return json.dumps(dict(self.files), sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()

    @classmethod
    def parse(cls, content: bytes) -> "Bundle":
        """The bundle with this `content`. Raises RecipeError: it is none."""
        try:
            files = json.loads(content)
        except ValueError as error:
            raise RecipeError(f"the recipe is damaged: {error}") from error
        if not isinstance(files, dict) or not all(isinstance(text, str) for text in files.values()):
            raise RecipeError("the recipe is damaged: it is no table of files")
        return cls(files).checked()

    def checked(self) -> "Bundle":
        """This bundle. Raises RecipeError: a path is unsafe, `recipe.py` is missing, or the files are too large."""
        if MAIN not in self.files:
            raise RecipeError(f"the recipe has no {MAIN}: name its main file {MAIN}, or give the file alone")
        if len(self.files) > MOST_FILES:
            raise RecipeError(f"a recipe has at most {MOST_FILES} files, not {len(self.files):,}: {_ADVICE}")
        for path, text in self.files.items():
            if not is_safe_path(path):
                raise RecipeError(f"{path!r} is not a path inside the recipe's folder: use plain relative paths")
            if "\0" in text:
                raise RecipeError(f"{path} is not text: {_ADVICE}")
        try:
            size = len(self.content)
        except UnicodeEncodeError as error:
            raise RecipeError("a file is not valid Unicode: save it in UTF-8") from error
        if size > MOST_BYTES:
            raise RecipeError(f"a recipe has at most {MOST_BYTES:,} bytes, not {size:,}: {_ADVICE}")
        return self

    def write(self, folder: Path) -> None:
        """Write the files below `folder`. Raises OSError."""
        for path, text in self.files.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(text.encode())


def of_package(recipe: str) -> Bundle:
    """The bundle of a recipe `package:NAME`, the same on every machine."""
    return Bundle({MAIN: packages.stub(recipe)}, recipe)


_ADVICE = "keep data out of a recipe, in a data set or a folder"


def read(path: Path) -> Bundle:
    """The bundle of a Python file, of the text files in a folder (hidden files and caches are left out), or of a recipe
    `package:NAME`.

    Raises: RecipeError: there is no such recipe, it is too large, or a file is not text.
    """
    if str(path).startswith(PACKAGE):
        packages.package_of(str(path))
        return of_package(str(path))
    if path.is_file():
        return Bundle({MAIN: _text(path, path.name)}).checked()
    if not path.is_dir():
        raise RecipeError(f"there is no file or folder {path}: give a Python file, or a folder with a {MAIN}")
    files: dict[str, str] = {}
    for relative in _below(path):
        if len(files) == MOST_FILES:
            raise RecipeError(f"{path} has more than {MOST_FILES} files: {_ADVICE}")
        files[relative.as_posix()] = _text(path / relative, relative.as_posix())
    return Bundle(files).checked()


def _below(folder: Path) -> Iterator[PurePosixPath]:
    for path in sorted(folder.rglob("*")):
        relative = PurePosixPath(path.relative_to(folder).as_posix())
        if path.is_file() and not any(part.startswith(".") or part in _IGNORED for part in relative.parts):
            yield relative


def _text(path: Path, name: str) -> str:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise RecipeError(f"{name} has more than {MOST_BYTES:,} bytes: {_ADVICE}")
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise RecipeError(f"{name} is not text in UTF-8: {_ADVICE}") from error
    except OSError as error:
        raise RecipeError(f"{name} cannot be read: {error.strerror}") from error
