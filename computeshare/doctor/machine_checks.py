"""Checks of this machine."""

import contextlib
import ctypes
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import psutil

from computeshare import __version__
from computeshare.confinement.methods import Method, method
from computeshare.doctor.machine import Check, Surroundings
from computeshare.errors import SettingsError
from computeshare.jobspec.catalog import catalog
from computeshare.runtime.database_file import DAY_S
from computeshare.terminal.output import duration, size
from computeshare.transport.addresses import without_secret

DISK_WARN, DISK_FAIL = 5_000_000_000, 500_000_000
OLDEST_PYTHON, TOO_NEW_PYTHON = (3, 11), (3, 14)
DATABASE_S = 20.0
"""Seconds to spend on the check of the database for damage."""
CONNECT_S = 3.0
"""Seconds that a host with data sets may take to accept a connection."""
_UNUSED = {
    "cuda": "torch cannot use the NVIDIA GPU here: check the driver and torch's CUDA build",
    "mps": "torch cannot use this Mac's GPU: macOS 14 or newer and a torch for arm64 are needed",
}
"""Advice if torch does not see the machine's device."""
_PACKAGES = ("torch", "torchvision", "numpy", "redis", "rq", "pydantic", "fastapi", "safetensors")


def python(_: Surroundings) -> Check:
    check = judged_python(sys.version_info[:3])
    if check.status == "ok" and is_translated():
        advice = "it cannot use the GPU: make install PYTHON=/opt/homebrew/bin/python3.12, or another one for arm64"
        return Check("python", "warn", f"{check.finding}, translated: this is Apple silicon", advice)
    return check


def is_translated() -> bool:
    """Whether this is an Intel process that a Mac with Apple silicon translates (Rosetta)."""
    answer, length = ctypes.c_int(), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    try:
        ask = ctypes.CDLL(None).sysctlbyname
    except (AttributeError, OSError, TypeError):  # no Mac
        return False
    failed = ask(b"sysctl.proc_translated", ctypes.byref(answer), ctypes.byref(length), None, 0)
    return not failed and answer.value == 1


def judged_python(version: tuple[int, ...]) -> Check:
    """The check of a Python version against the supported range."""
    found = f"Python {'.'.join(map(str, version))} on {platform.system()} {platform.machine()}"
    if OLDEST_PYTHON <= version[:2] < TOO_NEW_PYTHON:
        return Check("python", "ok", found)
    how = "too old" if version[:2] < OLDEST_PYTHON else "newer than torch and this release support"
    return Check("python", "fail", f"{found} is {how}", "use Python 3.11, 3.12 or 3.13: make install PYTHON=python3.12")


def packages(_: Surroundings) -> Check:
    versions: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            return Check(
                "packages", "fail", f"{name} is not installed", "install computeshare again, with all it needs"
            )
    found = f"computeshare {__version__}, " + ", ".join(f"{name} {version}" for name, version in versions.items())
    if not versions["rq"].startswith("3.0."):
        return Check("packages", "fail", found, "rq must be 3.0.*: install computeshare again")
    if versions["torch"].split("+")[0].split(".")[:2] != catalog().torch.split(".")[:2]:
        advice = f"jobs are checked against torch {catalog().torch}: equal bits need the same version on all workers"
        return Check("packages", "warn", found, advice)
    return Check("packages", "ok", found)


def device(machine: Surroundings) -> Check:
    from computeshare.training.devices import guess

    probe = machine.probe
    if error := probe.get("error"):
        return Check("device", "fail", str(error), "install torch and torchvision again, as one pair of versions")
    found = f"{probe['device']}, {probe['threads']} threads; torch loads in {probe['seconds']:.0f} s"
    if (best := guess()) != "cpu" and not probe["device"].startswith(best):
        return Check("device", "warn", found, _UNUSED[best])
    if trouble := probe["torchvision"]:
        return Check("device", "warn", f"{found}; torchvision: {trouble}", "install torchvision for this torch")
    return Check("device", "ok", found)


def home(machine: Surroundings) -> Check:
    folder = machine.settings.home
    existing = _existing(folder)
    advice = "make it writable, or set COMPUTESHARE_HOME to a folder that is"
    if not existing.is_dir():
        return Check("home", "fail", f"{existing} is not a folder", advice)
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        return Check("home", "fail", f"{existing}: {error.strerror}", advice)
    return Check("home", "ok", f"{folder} is writable" if folder.is_dir() else f"{folder} can be made")


def disk(machine: Surroundings) -> Check:
    free = shutil.disk_usage(_existing(machine.settings.home)).free
    status: Literal["ok", "warn", "fail"] = "fail" if free < DISK_FAIL else "warn" if free < DISK_WARN else "ok"
    advice = "free some space, or set COMPUTESHARE_HOME to a larger disk: checkpoints and data sets lie there"
    return Check("disk", status, f"{size(free)} free", "" if status == "ok" else advice)


def database(machine: Surroundings) -> Check:
    """The control plane's database file and its copies, if the control plane is on this machine."""
    try:
        file = machine.settings.database_file
        if not file.path.exists():
            return Check("database", "ok", "no database here yet: `computeshare up` creates it")
        told = f"{file.path}, {size(file.path.stat().st_size)}"
        copy = file.newest_copy()
        age_s = time.time() - copy.stat().st_mtime if copy else 0.0
        trouble = file.damage(DATABASE_S)
    except TimeoutError as error:
        advice = f'check a copy of it whole: sqlite3 COPY "PRAGMA quick_check" (copies lie in {file.backups})'
        return Check("database", "warn", f"{told}: {error}", advice)
    except (SettingsError, OSError) as error:
        return Check("database", "fail", str(error), "check COMPUTESHARE_DATABASE_URL and the file's permissions")
    if trouble:
        return Check("database", "fail", f"{told}: {trouble}", file.advice())
    if machine.run and age_s > 2 * DAY_S:
        advice = f"look for `cannot copy the database` in {machine.settings.home / 'logs' / 'api.log'}"
        return Check("database", "warn", f"{told}; the newest copy is {duration(age_s)} old", advice)
    newest = f"newest copy {copy.name}, {duration(age_s)} old" if copy else "no copy yet"
    return Check("database", "ok", f"{told}; {newest}")


def processes(machine: Surroundings) -> Check:
    if machine.run is None:
        return Check("processes", "ok", "`computeshare up` does not run on this home")
    pids = [(role, pid) for role, each in machine.run.pids.items() for pid in each]
    dead = [f"{role} {pid}" for role, pid in pids if not psutil.pid_exists(pid)]
    if not dead:
        return Check("processes", "ok", ", ".join(f"{len(each)} {role}" for role, each in machine.run.pids.items()))
    if len(dead) == len(pids):
        advice = "`computeshare up` was killed; start it again"
        return Check("processes", "fail", f"{machine.settings.run_path} names only dead processes", advice)
    advice = f"`computeshare up` restarts them; if it does not, look at {machine.settings.home / 'logs'}"
    return Check("processes", "warn", f"missing: {', '.join(dead)}", advice)


def port(machine: Surroundings) -> Check:
    if machine.run and urlsplit(machine.run.url).port == machine.port and processes(machine).status != "fail":
        return Check("port", "ok", f"{machine.port} is that of the running `computeshare up`")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", machine.port))
        except OSError as error:
            advice = f"use another port: computeshare up --port {machine.port + 1}"
            return Check("port", "warn", f"{machine.port} cannot be used: {error.strerror}", advice)
    return Check("port", "ok", f"{machine.port} is free")


def proxies(machine: Surroundings) -> Check:
    """Whether proxies from the environment would also get requests to this machine or the control plane."""
    found = {kind: url for kind, url in getproxies().items() if kind in ("http", "https", "all")}
    if not found:
        return Check("proxies", "ok", "none in the environment")
    shown = ", ".join(f"{kind} by {without_secret(url)}" for kind, url in sorted(found.items()))
    hosts = ["127.0.0.1", "localhost"]
    with contextlib.suppress(SettingsError, ValueError):
        hosts.append(urlsplit(machine.settings.resolve_url()).hostname or "")
    swallowed = [host for host in dict.fromkeys(hosts) if host and not proxy_bypass(host)]
    if not swallowed:
        return Check("proxies", "ok", f"{shown}, past this machine and the control plane")
    advice = f"export NO_PROXY={','.join(swallowed)}, and the same as no_proxy: browsers, curl and scripts obey them"
    return Check("proxies", "warn", f"{shown}: also asked for {', '.join(swallowed)}", advice)


def recipes(_: Surroundings) -> Check:
    """How recipes, which are other people's code, are confined here."""
    return judged_method(method())


def judged_method(by: Method) -> Check:
    if by.confines:
        return Check("recipes", "ok", " ".join((f"confined by {by.name}.", *by.remarks)))
    told, *advice = by.remarks
    return Check("recipes", "warn", f"not confined. {told}", " ".join(advice))


def data_sets(machine: Surroundings) -> Check:
    found: dict[str, str] = machine.probe.get("data_sets", {})
    if not found:
        return Check("data sets", "warn", "not checked: torch does not load")
    damaged = [f"{name}: {trouble}" for name, trouble in found.items() if trouble not in ("", "missing")]
    there = ", ".join(name for name, trouble in found.items() if not trouble)
    if damaged:
        return Check("data sets", "fail", "; ".join(damaged), "delete the damaged files: they are downloaded again")
    missing = [name for name, trouble in found.items() if trouble]
    sources: dict[str, list[str]] = machine.probe.get("sources", {})
    away = out_of_reach({name: sources[name] for name in missing if name in sources})
    told = [f"{there} here"]
    if there_soon := [name for name in missing if name not in away]:
        told.append(f"downloaded when first used: {', '.join(there_soon)}")
    if not away:
        return Check("data sets", "ok", "; ".join(told))
    hosts = ", ".join(dict.fromkeys(" or ".join(_hosts(sources[name])) for name in away))
    advice = (
        f"copy the files to {machine.settings.data_dir}, in torchvision's layout, or let this machine reach {hosts}"
    )
    return Check("data sets", "warn", "; ".join([*told, f"missing, and out of reach: {', '.join(away)}"]), advice)


def out_of_reach(sources: Mapping[str, Sequence[str]]) -> list[str]:
    """The names of the data sets none of whose addresses accepts a connection; all are tried in parallel."""
    addresses = sorted({url for urls in sources.values() for url in urls})
    with ThreadPoolExecutor(len(addresses) or 1) as pool:
        opens = dict(zip(addresses, pool.map(_opens, addresses), strict=True))
    return [name for name, urls in sources.items() if not any(opens[url] for url in urls)]


def _opens(url: str) -> bool:
    """Whether a TCP connection for a download opens: to the address's host, or to the environment's proxy."""
    try:
        parts = urlsplit(url)
        if (proxy := getproxies().get(parts.scheme)) and not proxy_bypass(parts.hostname or ""):
            parts = urlsplit(proxy if "//" in proxy else f"//{proxy}", parts.scheme)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), CONNECT_S).close()
    except (OSError, ValueError):
        return False
    return True


def _hosts(urls: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(urlsplit(url).hostname or url for url in urls))


def _existing(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
