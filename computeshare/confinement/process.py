"""Starts a confined process."""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from computeshare.confinement import bubblewrap, folders, landlock, launcher
from computeshare.confinement.methods import Method, method
from computeshare.confinement.watch import MOST_TASKS
from computeshare.errors import Unconfined

MOST_BYTES = 16 << 30
"""Of one file that a confined process writes, unless told otherwise."""
_MOST_FILES = 4096
"""Open at once."""
_BESIDE = 1 << 30
"""Address space that torch's libraries take beside the memory in use."""
_PASSED_ON = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"),
    *("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "TZ"),
)


def start(
    argv: Sequence[str],
    *,
    scratch: Path,
    readable: Sequence[Path] = (),
    pass_fds: Sequence[int] = (),
    gpu: bool = False,
    memory_bytes: int = 0,
    file_bytes: int = MOST_BYTES,
    forks: bool = False,
    environment: Mapping[str, str] = {},
    stdin: int | IO[bytes] = subprocess.DEVNULL,
    output: int | IO[bytes] = subprocess.PIPE,
    by: Method | None = None,
) -> "subprocess.Popen[bytes]":
    """Start a process that reads little, writes only below `scratch`, has no network, and reaches no other process.

    It ends with the thread that calls this. Read its files with `scratch.read`, which follows no links.

    Args:
        argv: the command; its program as an absolute path, such as `sys.executable`.
        scratch: an existing folder: its working folder, HOME and TMPDIR.
        readable: files and folders that it may read, beside the system's libraries and Python.
        pass_fds: file descriptors that it inherits; it inherits no other.
        gpu: whether it may use GPUs.
        memory_bytes: most memory that it should take; 0: no limit. Only `watch` keeps it to that exactly, and at all
            with `gpu`.
        file_bytes: size of the largest file that it may write.
        forks: whether it may start other processes; only where `Method.forks`, else it may not.
        environment: variables for it beside the few that it gets.
        output: where both its standard output and its errors go; never a terminal, whose keys it could read.
        by: the method; default the best here. `NONE` confines nothing, and has to be asked for.
    Raises: Unconfined: nothing here can confine it.
    """
    by = by or method()
    if not by.confines and by is method():
        raise Unconfined(" ".join(by.remarks))
    scratch = scratch.resolve(strict=True)
    limits = {"CORE": 0, "NOFILE": _MOST_FILES, "FSIZE": file_bytes}
    if memory_bytes and not gpu:
        limits["DATA"] = memory_bytes + _BESIDE
    return subprocess.Popen(
        _command(list(argv), by, scratch, _both(readable), gpu, forks and by.forks, limits),
        stdin=stdin,
        stdout=output,
        stderr=subprocess.STDOUT,
        pass_fds=tuple(pass_fds),
        env=_environment(scratch) | dict(environment),
        cwd=scratch,
        start_new_session=True,
    )


def _command(
    argv: list[str],
    by: Method,
    scratch: Path,
    readable: tuple[Path, ...],
    gpu: bool,
    forks: bool,
    limits: dict[str, int],
) -> list[str]:
    root = str(folders.package_root())
    match by.name:
        case "bubblewrap":
            order = launcher.Order(0, limits | _tasks(), forks, contained=True, access=None)
            wrap = [str(bubblewrap.program()), *bubblewrap.options(readable, scratch, gpu)]
            return [*wrap, *launcher.command(root, order, argv)]
        case "landlock":
            access = _access(readable, scratch, gpu)
            order = launcher.Order(os.getpid(), limits, forks, contained=False, access=access)
            return launcher.command(root, order, argv)
        case _:
            return argv


def _tasks() -> dict[str, int]:
    """The limit on processes and threads, where it counts those of the namespace: before, it counts all the user's."""
    release = tuple(int(word) for word in re.findall(r"\d+", platform.release())[:2])
    return {"NPROC": MOST_TASKS} if release >= (5, 14) else {}


def _access(readable: tuple[Path, ...], scratch: Path, gpu: bool) -> landlock.Access:
    python = folders.python_paths()
    kernel = ("self", "cpuinfo", "meminfo", "stat", "filesystems", "version", "sys/vm/overcommit_memory")
    drivers = ("driver", "devices", "modules") if gpu else ()
    read = (*folders.SYSTEM, *folders.CONFIGURATION, *(folders.GPU if gpu else folders.PROCESSOR))
    return landlock.Access(
        read=(*read, *(f"/proc/{name}" for name in (*kernel, *drivers)), *map(str, (*python, *readable))),
        names=tuple(map(str, folders.names_for_python())),
        devices=(*folders.DEVICES, *map(str, folders.gpu_devices() if gpu else ())),
        write=(str(scratch),),
    )


def _both(paths: Sequence[Path]) -> tuple[Path, ...]:
    """Each path as given and without links."""
    return tuple(dict.fromkeys(one for path in paths for one in (path.absolute(), path.resolve())))


def _environment(scratch: Path) -> dict[str, str]:
    passed = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    path = os.pathsep.join((str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"))
    place = str(scratch)
    return {"PATH": path, "LANG": "C.UTF-8", "HOME": place, "TMPDIR": place, "USER": "recipe", **passed}
