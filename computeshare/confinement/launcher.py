"""Runs in the process to be confined, before the program that it then becomes: gives up what it may not have.

It is started by Python without `site`, so it imports nothing but the standard library and its neighbours.
"""

import ctypes
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from computeshare.confinement import landlock, seccomp

_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 24, 38
_CAPABILITIES = 0x20080522  # _LINUX_CAPABILITY_VERSION_3


@dataclass(frozen=True, slots=True)
class LaunchOrder:
    """Restrictions that a launched process puts on itself."""

    parent: int
    """Id of the process with which this one ends; 0: another sees to that."""
    limits: dict[str, int]
    """Resource limits by the name that follows `RLIMIT_`; lowered, never raised."""
    forks: bool
    """Whether it may start other processes."""
    contained: bool
    """Whether it has namespaces of its own."""
    access: landlock.PathAccess | None
    """Paths that the process may open, if Landlock is to enforce them."""

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> "LaunchOrder":
        values: dict[str, Any] = json.loads(text)
        access = values.pop("access")
        return cls(**values, access=landlock.PathAccess(**access) if access else None)


def command(root: str, order: LaunchOrder, argv: Sequence[str]) -> list[str]:
    """The command that carries out the order and becomes `argv`; `root` holds this package."""
    start = "import sys; sys.path.append(sys.argv[1]); from computeshare.confinement.launcher import main; main()"
    return [sys.executable, "-I", "-S", "-c", start, root, order.dumps(), *argv]


def main() -> None:
    """`ROOT ORDER ARGV...`: become ARGV, confined. Ends with code 126 where that fails."""
    order, argv = LaunchOrder.loads(sys.argv[2]), sys.argv[3:]
    try:
        _give_up(order)
        os.execv(argv[0], argv)  # noqa: S606
    except OSError as error:
        print(f"cannot confine the process: {error}", file=sys.stderr)
        sys.exit(126)


def _give_up(order: LaunchOrder) -> None:
    for name, most in order.limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        _, hard = resource.getrlimit(kind)
        allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (allowed, allowed))
    if sys.platform != "linux":
        _end_with(order.parent)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if order.parent:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != order.parent:
            raise ProcessLookupError("the process that asked for it has ended")
    _drop_capabilities(libc)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "PR_SET_NO_NEW_PRIVS")
    if order.access:
        landlock.restrict(order.access)
    seccomp.install(order.contained, order.forks)


def _end_with(parent: int, every_s: float = 0.5) -> None:
    """Leave a process outside that ends this one, whatever it becomes, once `parent` has ended."""
    this = os.getpid()
    if os.fork():
        return
    os.closerange(0, 1 << 16)
    while os.getppid() == this:
        try:
            os.kill(parent, 0)
        except ProcessLookupError:
            os.kill(this, signal.SIGKILL)
        time.sleep(every_s)
    os._exit(0)


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """Keep none of root's special rights, and regain none by becoming another program."""
    number = 0
    while libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) == 0:  # fails without the right to, and at the last one
        number += 1
    header, none = (ctypes.c_uint32 * 2)(_CAPABILITIES, 0), (ctypes.c_uint32 * 6)()
    if libc.capset(ctypes.byref(header), ctypes.byref(none)):
        raise OSError(ctypes.get_errno(), "capset")
