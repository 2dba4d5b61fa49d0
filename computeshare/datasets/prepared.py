"""The result of preparing a data set, and helpers: progress, and a limit on the files left out."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from computeshare.errors import DatasetError
from computeshare.jobspec.tasks.own_data import DataKind, DatasetSizes

FEW_BROKEN, BROKEN_SHARE = 10, 0.01
"""So many files may be left out because they cannot be read, or this share of all, whichever is more."""
NAMED = 5
"""The most files that a message names."""
TEST_EVERY = 10
"""Where the data come undivided, one sample in so many is for the test."""

Advance = Callable[[str, int, int], object]
"""Gets what is being done, how much of it is done, and the whole: samples or bytes."""


def quiet(doing: str, done: int, whole: int) -> None:
    """Show no progress."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A data set that is ready to be added.

    Args:
        folder: of its files.
        remarks: what a user should know of it, in sentences.
    """

    folder: Path
    kind: DataKind
    sizes: DatasetSizes
    remarks: tuple[str, ...] = ()


@dataclass(slots=True)
class Broken:
    """Files that cannot be read, of `whole` files in all."""

    whole: int
    reasons: list[str] = field(default_factory=list)

    def leave_out(self, name: str, reason: object) -> None:
        """Leave a file out. Raises DatasetError: they are too many."""
        self.reasons.append(f"{name}: {reason}")
        if len(self.reasons) > max(FEW_BROKEN, BROKEN_SHARE * self.whole):
            raise DatasetError(
                f"more than {len(self.reasons) - 1} of {self.whole:,} files cannot be read, for example "
                f"{'; '.join(self.reasons[:NAMED])}. Mend them or take them out, then add the data set again"
            )

    @property
    def remarks(self) -> tuple[str, ...]:
        """A sentence for each file that was left out."""
        return tuple(f"Left out {one}" for one in self.reasons)


def listed(names: list[str]) -> str:
    """The first few names as text."""
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED:,} more" if len(names) > NAMED else "")


def is_hidden(path: Path, source: Path) -> bool:
    """Whether a path below `source` is one that file managers and version control put there."""
    return any(part.startswith((".", "__MACOSX")) or part in _CLUTTER for part in path.relative_to(source).parts)


_CLUTTER = ("Thumbs.db", "desktop.ini", "Icon\r")
