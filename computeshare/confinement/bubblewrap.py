"""bubblewrap: namespaces in which the process sees no other process, no network, and only the files it is given."""

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from computeshare.confinement import folders

_NAMESPACES = (
    *("--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
    *("--die-with-parent", "--cap-drop", "ALL", "--hostname", "recipe"),
)


def program() -> str | None:
    """Where bubblewrap is installed."""
    return shutil.which("bwrap", path="/usr/bin:/bin:/usr/local/bin:/run/current-system/sw/bin")


def options(readable: Iterable[Path], scratch: Path, gpu: bool) -> list[str]:
    """The arguments between `bwrap` and the command to run, which starts in `scratch`."""
    return [
        *_NAMESPACES,
        *("--proc", "/proc", "--dev", "/dev"),
        *(argument for path in map(Path, folders.SYSTEM) if path.exists() for argument in _system(path)),
        *_read_only(map(Path, (*folders.CONFIGURATION, *(folders.GPU if gpu else folders.PROCESSOR)))),
        *_read_only(folders.outermost((*folders.python_paths(), *readable))),
        *(word for path in (folders.gpu_devices() if gpu else ()) for word in ("--dev-bind", str(path), str(path))),
        *("--bind", str(scratch), str(scratch)),
        # root's processes could write the kernel's settings in /proc, even those of a namespace
        *("--remount-ro", "/proc", "--remount-ro", "/dev", "--remount-ro", "/"),
        *("--chdir", str(scratch), "--"),
    ]


def _system(path: Path) -> tuple[str, ...]:
    if path.is_symlink():
        return ("--symlink", str(path.readlink()), str(path))
    return ("--ro-bind", str(path), str(path))


def _read_only(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        if not any(path.is_relative_to(known) for known in folders.SYSTEM):
            yield from ("--ro-bind-try", str(path), str(path))
