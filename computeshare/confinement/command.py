"""The command that runs another one confined."""

import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from computeshare.confinement import bubblewrap, folders, landlock, launcher, seatbelt
from computeshare.confinement.kinds import Method

MOST_TASKS = 2048
"""Processes and threads together."""
_KERNEL = (
    *("cpuinfo", "meminfo", "stat", "filesystems", "version", "sys/vm/overcommit_memory"),
    # of itself, but not all: `net` tells of the machine's connections
    *(
        f"self/{name}"
        for name in ("maps", "smaps_rollup", "status", "statm", "stat", "limits", "cmdline", "comm", "fd")
    ),
)
_GPU_KERNEL = ("driver", "devices", "modules")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Resources that a confined process may use."""

    scratch: Path
    """Where it writes; without links."""
    readable: tuple[Path, ...] = ()
    """Paths that it reads beside the system's libraries and Python."""
    gpu: bool = False
    forks: bool = False
    """Whether it may start other processes."""
    limits: Mapping[str, int] | None = None
    """Resource limits by the name that follows `RLIMIT_`."""


def confined(argv: Sequence[str], by: Method, bounds: Bounds) -> list[str]:
    """The command that runs `argv` by this method, as a child of this process."""
    limits, root = dict(bounds.limits or {}), str(folders.package_root())
    match by.name:
        case "bubblewrap":
            order = launcher.LaunchOrder(0, limits | _tasks(), bounds.forks, contained=True, access=None)
            wrap = [str(bubblewrap.program()), *bubblewrap.options(bounds.readable, bounds.scratch, bounds.gpu)]
            return [*wrap, *launcher.command(root, order, argv)]
        case "landlock":
            order = launcher.LaunchOrder(os.getpid(), limits, forks=False, contained=False, access=_access(bounds))
            return launcher.command(root, order, argv)
        case "sandbox-exec":
            limits.pop("DATA", None)  # macOS does not keep to it
            order = launcher.LaunchOrder(os.getpid(), limits, forks=False, contained=False, access=None)
            read = [os.path.realpath(path) for path in (*folders.python_paths(), *bounds.readable)]
            names = [os.path.realpath(path) for path in folders.names_for_python()]
            rules = seatbelt.profile(read, names, [str(bounds.scratch)], bounds.gpu)
            return launcher.command(root, order, [seatbelt.PROGRAM, "-p", rules, *argv])
        case "none":
            return list(argv)


def _tasks() -> dict[str, int]:
    """The limit on processes and threads, where it counts those of the namespace: before, it counts all the user's."""
    release = tuple(int(word) for word in re.findall(r"\d+", platform.release())[:2])
    return {"NPROC": MOST_TASKS} if release >= (5, 14) else {}


def _access(bounds: Bounds) -> landlock.PathAccess:
    kernel = (f"/proc/{name}" for name in (*_KERNEL, *(_GPU_KERNEL if bounds.gpu else ())))
    system = (*folders.SYSTEM, *folders.CONFIGURATION, *(folders.GPU if bounds.gpu else folders.PROCESSOR))
    return landlock.PathAccess(
        read=(*system, *kernel, *map(str, (*folders.python_paths(), *bounds.readable))),
        names=tuple(map(str, folders.names_for_python())),
        devices=(*folders.DEVICES, *map(str, folders.gpu_devices() if bounds.gpu else ())),
        write=(str(bounds.scratch),),
    )
