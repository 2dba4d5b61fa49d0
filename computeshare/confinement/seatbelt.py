"""macOS: the profile for `sandbox-exec`, by Apple's documentation and the profiles in /System/Library/Sandbox/Profiles.

Written with care, and not yet tried on a Mac. All that no rule allows is refused: among others the network, sending
Apple events, the keychain, starting processes and signals to others.
"""

import os
from collections.abc import Iterable, Sequence

PROGRAM = "/usr/bin/sandbox-exec"
_SYSTEM = (
    *("/System", "/Library/Apple", "/usr/lib", "/usr/bin", "/usr/share", "/bin", "/private/var/db/dyld"),
    *("/private/var/db/timezone", "/private/etc/localtime", "/private/etc/passwd", "/private/etc/ssl/openssl.cnf"),
    "/Library/Frameworks/Python.framework",
    *(f"{homebrew}/{name}" for homebrew in ("/opt/homebrew", "/usr/local") for name in ("Cellar", "opt", "lib")),
)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_GPU_CLASSES = ("AGXDeviceUserClient", "AGXSharedUserClient", "IOSurfaceRootUserClient", "IOAccelerator")
_USER_CACHE = 65538  # _CS_DARWIN_USER_CACHE_DIR


def profile(read: Sequence[str], names: Sequence[str], write: Sequence[str], gpu: bool) -> str:
    """The profile's text.

    Args:
        read: absolute paths without links, to be read with all that is below them.
        names: folders whose names may be listed.
        write: the same as `read`, to be read and written.
        gpu: whether Metal may be used.
    """
    readable = _paths((*_SYSTEM, *read, *write))
    rules = [
        "(version 1)",
        "(deny default)",
        '(import "system.sb")',
        "(deny network*)",
        "(allow process-exec)",
        "(allow process-info* (target self))",
        "(allow signal (target self))",
        "(allow sysctl-read)",
        '(allow file-read-metadata (subpath "/"))',
        f"(allow file-read* {_literals(('/', *names))} {readable})",
        f"(allow file-map-executable {_paths((*_SYSTEM, *read))})",
        f"(allow file-read* file-write-data {_literals(_DEVICES)})",
        f"(allow file-write* {_paths(write)})",
        '(allow mach-lookup (global-name "com.apple.system.opendirectoryd.libinfo"))',
        "(allow ipc-posix-sem)",
        # the threads of OpenMP register themselves there
        '(allow ipc-posix-shm* (ipc-posix-name-regex #"^/__KMP_REGISTERED_LIB_[0-9]+"))',
    ]
    return "\n".join([*rules, *(_gpu_rules() if gpu else ())]) + "\n"


def _gpu_rules() -> list[str]:
    """Metal: the device, the compiler of its programs, and that compiler's cache."""
    classes = " ".join(
        f'(iokit-registry-entry-class "{name}") (iokit-user-client-class "{name}")' for name in _GPU_CLASSES
    )
    compiler = '"com.apple.MTLCompilerService"'
    rules = [
        f"(allow iokit-open {classes})",
        "(allow iokit-get-properties)",
        f"(allow mach-lookup (global-name {compiler}) (xpc-service-name {compiler}))",
    ]
    if cache := _user_cache():
        places = _paths(f"{cache}/{name}com.apple.metal" for name in ("", "org.python.python/"))
        rules.append(f"(allow file-read* file-write* {places})")
    return rules


def _user_cache() -> str:
    """The folder of this user's caches, without links; empty off macOS."""
    try:
        found = os.confstr(_USER_CACHE)
    except (OSError, ValueError):
        return ""
    return os.path.realpath(found) if found else ""


def _literals(paths: Iterable[str]) -> str:
    return " ".join(f"(literal {_quoted(path)})" for path in paths)


def _paths(paths: Iterable[str]) -> str:
    return " ".join(f"(subpath {_quoted(path)})" for path in paths)


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
