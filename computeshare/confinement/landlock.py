"""Landlock: what a process may open, by the kernel's own means. Linux 6.2 and later."""

import contextlib
import ctypes
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass

OLDEST = 3
"""The oldest interface that will do: before it, a file that may not be written could still be cut to nothing."""
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # on every architecture
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_CHAR, _MAKE_BLOCK = 1 << 6, 1 << 11
_TRUNCATE, _IOCTL_DEV = 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_FILES, _FILES_ABI_5 = (1 << 15) - 1, (1 << 16) - 1
_NETWORK = 0b11  # TCP: bind, connect
_SCOPES = 0b11  # abstract unix sockets, signals


class _Attributes(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scopes", ctypes.c_uint64))


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


@dataclass(frozen=True, slots=True)
class PathAccess:
    """Paths that a process may open; each path includes all paths below it."""

    read: tuple[str, ...]
    names: tuple[str, ...] = ()
    """Folders whose names may be listed, but not read."""
    devices: tuple[str, ...] = ()
    write: tuple[str, ...] = ()


def version() -> int:
    """The version of the kernel's interface; 0 where there is none, or it is switched off."""
    return max(0, int(_libc().syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG)))


def restrict(access: PathAccess) -> None:
    """Take from this process, for good, what `access` does not name; it needs PR_SET_NO_NEW_PRIVS.

    Raises: OSError: the kernel refuses.
    """
    abi = version()
    handled = _FILES_ABI_5 if abi >= 5 else _FILES
    attributes = _Attributes(handled, _NETWORK if abi >= 4 else 0, _SCOPES if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = _checked(_libc().syscall(_CREATE_RULESET, ctypes.byref(attributes), size, 0))
    _allow(ruleset, access.read, _READ_FILE | _READ_DIR | _EXECUTE)
    _allow(ruleset, access.names, _READ_DIR)
    _allow(ruleset, access.devices, handled & (_READ_FILE | _WRITE_FILE | _READ_DIR | _IOCTL_DEV))
    _allow(ruleset, access.write, handled & ~(_EXECUTE | _MAKE_CHAR | _MAKE_BLOCK | _IOCTL_DEV))
    _checked(_libc().syscall(_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def _allow(ruleset: int, paths: Iterable[str], rights: int) -> None:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
            is_folder = stat.S_ISDIR(os.fstat(folder).st_mode)
            rule = _Beneath(rights if is_folder else rights & _OF_FILES, folder)
            _checked(_libc().syscall(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0))
            os.close(folder)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"Landlock: {os.strerror(number)}")
    return result


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
