"""The ways to confine a process, and what each does not promise."""

from dataclasses import dataclass
from typing import Literal

Name = Literal["bubblewrap", "landlock", "sandbox-exec", "none"]


@dataclass(frozen=True, slots=True)
class Method:
    """A way to confine a process."""

    name: Name
    remarks: tuple[str, ...] = ()
    """Limitations of the method, as sentences for the machine's owner."""

    @property
    def forks(self) -> bool:
        """Whether a confined process can be allowed to start others, such as a compiler: they all end with it."""
        return self.name in ("bubblewrap", "none")

    @property
    def confines(self) -> bool:
        return self.name != "none"


BUBBLEWRAP = Method("bubblewrap")
LANDLOCK = Method(
    "landlock",
    (
        "A recipe can find out which files and processes exist, but not read them.",
        "A recipe cannot start a compiler, so `compile` has no effect; with bubblewrap it can.",
    ),
)
SANDBOX_EXEC = Method(
    "sandbox-exec",
    (
        "The rules follow Apple's documentation; nobody has tried them on a Mac yet.",
        "A recipe can find out which files exist, but not read them.",
        "A recipe cannot start a compiler.",
    ),
)
RIGHTS = "A recipe runs with your rights: it can read and change your files, and use the network."


def without(advice: str) -> Method:
    """No confinement, with advice on how to change that."""
    return Method("none", (RIGHTS, advice))


NONE = Method("none", (RIGHTS,))
