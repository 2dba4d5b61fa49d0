"""Paths that every confined process may read: the system's libraries and Python."""

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import computeshare

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/gnu/store")
CONFIGURATION = tuple(
    f"/etc/{name}"
    for name in (
        *("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "nsswitch.conf", "passwd", "group"),
        *("localtime", "timezone", "os-release", "mime.types", "fonts", "OpenCL", "ssl/openssl.cnf"),
        *("pki/tls/openssl.cnf", "crypto-policies"),
    )
)
PROCESSOR = ("/sys/devices/system",)
"""Processors, caches and memory nodes: thread pools look there."""
GPU = ("/sys", "/opt/rocm", "/etc/nvidia", "/etc/vulkan")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_GPU_DEVICES = ("nvidia*", "kfd", "dri", "dxg")
_OF_AN_INSTALLATION = ("bin", "include", "lib", "lib64", "libexec", "pyvenv.cfg", "Python", "Resources")
"""Names in Python's prefix that Python needs: the prefix itself may be a project's folder, or even the user's own."""


def package_root() -> Path:
    """The folder that holds this package."""
    return Path(computeshare.__file__).parent.parent


def python_paths() -> tuple[Path, ...]:
    """The Python that runs here: its installation, its virtual environment, packages, and this package."""
    installed = (found for prefix in _prefixes() for name in _OF_AN_INSTALLATION if (found := prefix / name).exists())
    packages = (Path(entry) for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages"))
    return outermost((*installed, *packages, package_root() / "computeshare"))


def names_for_python() -> tuple[Path, ...]:
    """Folders whose names Python lists to find this package, where it runs from a project's folder."""
    return (package_root(),) if str(package_root()) in sys.path else ()


def _prefixes() -> Iterator[Path]:
    """The prefixes, and those by whose names the interpreter's links lead to the installation."""
    yield from map(Path, dict.fromkeys((sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix)))
    link = Path(sys.executable)
    for _ in range(40):
        if link.parent.name == "bin":
            yield link.parent.parent
        if not link.is_symlink():
            return
        link = Path(os.path.normpath(link.parent / link.readlink()))


def outermost(paths: Iterable[Path]) -> tuple[Path, ...]:
    """The absolute paths, without those below another."""
    found = sorted({path.absolute() for path in paths})
    return tuple(path for path in found if not any(other in path.parents for other in found))


def gpu_devices() -> tuple[Path, ...]:
    """The device nodes of GPUs here."""
    return tuple(sorted(path for pattern in _GPU_DEVICES for path in Path("/dev").glob(pattern)))
