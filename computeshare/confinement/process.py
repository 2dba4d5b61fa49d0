"""Starts a confined process."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from computeshare.confinement.command import Bounds, confined
from computeshare.confinement.methods import Method, method
from computeshare.errors import Unconfined
from computeshare.runtime.processes import set_session_priority

MOST_BYTES = 16 << 30
"""Of one file that a confined process writes, unless told otherwise."""
_MOST_FILES = 4096
"""Open at once."""
_BESIDE, _BESIDE_PER_PROCESSOR = 1 << 30, 32 << 20
"""Address space that torch's libraries and the stacks of its threads take beside the memory in use."""
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

    It has a session of its own, without a terminal, and the caller's priority, and ends with the thread that calls
    this. Read its files by `scratch.open_file`, which follows no links.

    Args:
        argv: the command; its program as an absolute path, such as `sys.executable`.
        scratch: an existing folder: its working folder, HOME and TMPDIR.
        readable: files and folders that it may read, beside the system's libraries and Python.
        pass_fds: file descriptors that it inherits; it inherits no other.
        gpu: whether it may use GPUs.
        memory_bytes: memory that it should take at most; 0: no limit. This makes an allocation far above fail, without
            `gpu`; `watch` ends the process at the limit.
        file_bytes: size of the largest file that it may write.
        forks: whether it may start other processes, where `Method.forks` allows that.
        environment: variables for it beside the few that it gets.
        output: where both its standard output and its errors go; never a terminal, whose keys it could read.
        by: the method; default the best here. A method that does not confine has to be given.
    Raises: Unconfined: nothing here can confine it.
    """
    if by is None and not method().confines:
        raise Unconfined(" ".join(method().remarks))
    by, place = by or method(), scratch.resolve(strict=True)
    limits = {"CORE": 0, "NOFILE": _MOST_FILES, "FSIZE": file_bytes}
    if memory_bytes and not gpu:
        limits["DATA"] = memory_bytes + _BESIDE + _BESIDE_PER_PROCESSOR * (os.cpu_count() or 1)
    process = subprocess.Popen(
        confined(argv, by, Bounds(place, _both(readable), gpu, forks and by.forks, limits)),
        stdin=stdin,
        stdout=output,
        stderr=subprocess.STDOUT,
        pass_fds=tuple(pass_fds),
        env=_environment(place) | dict(environment),
        cwd=place,
        start_new_session=True,
    )
    if (nice := os.nice(0)) > 0:
        set_session_priority(nice, process.pid)
    return process


def _both(paths: Sequence[Path]) -> tuple[Path, ...]:
    """Each path as given and without links."""
    return tuple(dict.fromkeys(one for path in paths for one in (path.absolute(), path.resolve())))


def _environment(place: Path) -> dict[str, str]:
    passed = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    path = os.pathsep.join((str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"))
    own = {"LANG": "C.UTF-8", "HOME": str(place), "TMPDIR": str(place), "USER": "recipe"}
    own["JOBLIB_MULTIPROCESSING"] = "0"  # scikit-learn's helper warns that it finds no semaphores, else
    return {"PATH": path, **own, **passed}
