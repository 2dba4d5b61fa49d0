"""How this machine confines a process."""

import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

from computeshare.confinement import bubblewrap, landlock, scratch, seatbelt, seccomp
from computeshare.confinement.command import Bounds, confined
from computeshare.confinement.kinds import BUBBLEWRAP, LANDLOCK, NONE, SANDBOX_EXEC, Method, without

__all__ = ["NONE", "Method", "available", "method"]

_TRIAL_S = 30.0
_INSTALL = "Install bubblewrap to confine it (Debian, Ubuntu: apt install bubblewrap)."


@cache
def method() -> Method:
    """How recipes are confined here: the best method that works, else `none`; its remarks say what does not work."""
    troubles: list[str] = []
    for one in _present():
        trouble = _trouble(one)
        if not trouble:
            return replace(one, remarks=(*one.remarks, *troubles))
        troubles.append(f"{one.name} does not work here: {trouble}.")
    if troubles:
        return without(" ".join(troubles))
    return without(_INSTALL if sys.platform == "linux" else "This system has no means to confine it.")


def available() -> tuple[Method, ...]:
    """All methods that work here, best first."""
    return tuple(one for one in _present() if not _trouble(one))


def _present() -> tuple[Method, ...]:
    if sys.platform == "darwin":
        return (SANDBOX_EXEC,) if Path(seatbelt.PROGRAM).exists() else ()
    if sys.platform != "linux" or not seccomp.is_known():
        return ()
    found = (BUBBLEWRAP,) if bubblewrap.program() else ()
    return (*found, LANDLOCK) if landlock.version() >= landlock.OLDEST else found


def _trouble(by: Method) -> str:
    """Why this method does not work, from a try: systems forbid namespaces to users, and containers forbid them."""
    with scratch.temporary() as folder:
        command = confined([sys.executable, "-I", "-c", ""], by, Bounds(folder))
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TRIAL_S, check=False, cwd=folder)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
