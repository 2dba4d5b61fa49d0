"""How this machine confines a process, and what that cannot promise."""

import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from computeshare.confinement import bubblewrap, landlock, seccomp

_TRIAL_S = 20.0
Name = Literal["bubblewrap", "landlock", "sandbox-exec", "none"]


@dataclass(frozen=True, slots=True)
class Method:
    """A way to confine a process."""

    name: Name
    remarks: tuple[str, ...] = ()
    """What is not promised, as sentences for the machine's owner."""

    @property
    def forks(self) -> bool:
        """Whether a confined process can be allowed to start others, such as a compiler: all of them end with it."""
        return self.name in ("bubblewrap", "none")

    @property
    def confines(self) -> bool:
        return self.name != "none"


BUBBLEWRAP = Method("bubblewrap")
LANDLOCK = Method(
    "landlock",
    (
        "Recipes can find out which files and processes exist, but read none of them.",
        "Recipes cannot start a compiler: with compile, they train as without it. Install bubblewrap to change that.",
    ),
)
SANDBOX_EXEC = Method(
    "sandbox-exec",
    ("The rules for macOS follow Apple's documentation, and have not been tried on a Mac.",),
)
NONE = Method(
    "none",
    (
        "Recipes run with your rights: they can read your files, change them, and reach the network. "
        + (
            "Install bubblewrap to confine them (Debian, Ubuntu: apt install bubblewrap)."
            if sys.platform == "linux"
            else "This system has no means to confine them."
        ),
    ),
)


def available() -> tuple[Method, ...]:
    """The methods that work here, best first."""
    if sys.platform == "darwin":
        return (SANDBOX_EXEC,) if Path("/usr/bin/sandbox-exec").exists() else ()
    if sys.platform != "linux" or not seccomp.is_known():
        return ()
    found = (BUBBLEWRAP,) if _bubblewrap_works() else ()
    return (*found, LANDLOCK) if landlock.version() >= landlock.OLDEST else found


@cache
def method() -> Method:
    """How recipes are confined here: the best method that works, else `NONE`."""
    return next(iter(available()), NONE)


def _bubblewrap_works() -> bool:
    """Whether it is installed and may make namespaces: some systems forbid that to users, and containers do."""
    program = bubblewrap.program()
    if program is None:
        return False
    command = [program, *bubblewrap.options((), Path("/usr"), gpu=False), "/bin/sh", "-c", "exit 0"]
    try:
        return subprocess.run(command, capture_output=True, timeout=_TRIAL_S, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
