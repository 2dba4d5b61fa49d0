"""With its owner's consent, replaces a worker that was installed from a wheel by the control plane's version.

The wheel and its digest come over the connection by which the machine joined: TLS with a certificate that the system
trusts or that the invite pinned, or this machine's own loopback.
"""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import httpx2
import structlog
from packaging.version import InvalidVersion, Version

import computeshare
from computeshare.errors import VersionError
from computeshare.protocol.handshake import OURS, Release
from computeshare.settings import is_gateway_url
from computeshare.transport.addresses import is_loopback_url
from computeshare.transport.forwarder import GatewayAccess, trust

DISTRIBUTION = "computeshare-worker"
FLOOR = Version("0.1.0")
"""The oldest release that is installed, however old the control plane is: earlier ones cannot upgrade again."""
LARGEST_BYTES = 64 << 20
TIMEOUT_S, INSTALL_S = 30.0, 1800.0
_FILE = re.compile(r"computeshare_worker-[\w.+]+-py3-none-any\.whl", re.ASCII)
_SAY_RELEASE = "from computeshare.protocol.handshake import OURS; print(OURS.version, OURS.protocol)"
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ReleaseOffer:
    """The worker that a control plane serves."""

    release: Release
    file: str
    sha256: str


def can_upgrade() -> bool:
    """Whether this worker runs from an installed wheel, and not from a checkout."""
    try:
        installed = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return False
    return Path(str(installed.locate_file("computeshare"))).resolve() == Path(computeshare.__file__).parent.resolve()


def upgrade(access: GatewayAccess | None, arguments: Sequence[str]) -> NoReturn:
    """Install the control plane's version in place of this one, and start it with these arguments.

    Raises: VersionError: that cannot be done, and this version is as it was.
    """
    if not can_upgrade():
        raise VersionError("--upgrade does nothing here: this worker runs from a checkout, not from a wheel")
    base = access.url.partition("/v1/")[0] if access else ""
    if access is None or not is_gateway_url(base):
        raise VersionError("--upgrade needs a machine that joined by an invite with https://: ask for one")
    with tempfile.TemporaryDirectory(prefix="computeshare-") as folder:
        wheel, offer = fetch(base, access.certificate, Path(folder))
        _try_out(wheel, offer.release)
        log.warning(told(OURS, offer.release))
        install(wheel)
    os.execv(sys.executable, [sys.executable, "-P", "-m", "computeshare.worker.process", *arguments])  # noqa: S606


def told(ours: Release, offered: Release) -> str:
    """The effect of the upgrade, in words for the owner. Raises VersionError: the upgrade must not be done. Pure."""
    try:
        before, after = Version(ours.version), Version(offered.version)
    except InvalidVersion as error:
        raise VersionError(f"the control plane offers a release that has no version: {error}") from error
    if offered == ours:
        raise VersionError(f"the control plane offers {offered}, which runs here: ask its owner to restart it")
    if after < FLOOR:
        raise VersionError(
            f"the control plane offers {offered}, and this worker goes back to {FLOOR} at most: ask for an upgrade of "
            "the control plane"
        )
    if after < before:
        return f"the control plane is older: going back from {ours} to {offered}"
    return f"upgrading from {ours} to {offered}"


def fetch(base: str, certificate: str, folder: Path) -> tuple[Path, ReleaseOffer]:
    """Download the wheel of the control plane at `base` into `folder`, and compare its digest. Raises VersionError."""
    how: dict[str, Any] = {"timeout": TIMEOUT_S, "trust_env": not is_loopback_url(base)}
    try:
        with httpx2.Client(base_url=base, verify=trust(certificate), **how) as client:
            offer = _offer(client.get("/v1/worker/release").raise_for_status().json())
            told(OURS, offer.release)
            digest, size, path = hashlib.sha256(), 0, folder / offer.file
            with client.stream("GET", f"/v1/worker/{offer.file}") as answer, open(path, "wb") as file:
                for piece in answer.raise_for_status().iter_bytes():
                    digest.update(piece)
                    file.write(piece)
                    if (size := size + len(piece)) > LARGEST_BYTES:
                        raise VersionError(f"the control plane's wheel is larger than {LARGEST_BYTES:,} bytes")
    except (httpx2.HTTPError, OSError, ValueError) as error:
        raise VersionError(f"the control plane's wheel cannot be fetched: {error}") from error
    if digest.hexdigest() != offer.sha256:
        raise VersionError("the control plane's wheel has another digest than it says: try again")
    return path, offer


def _offer(said: Any) -> ReleaseOffer:
    """Raises ValueError: the answer is no release."""
    try:
        found = ReleaseOffer(
            Release(str(said["version"]), int(said["protocol"])), str(said["file"]), str(said["sha256"])
        )
    except (KeyError, TypeError) as error:
        raise ValueError("its answer names no release") from error
    if not _FILE.fullmatch(found.file):
        raise ValueError(f"{found.file[:100]!r} is no wheel of a worker")
    return found


def _try_out(wheel: Path, release: Release) -> None:
    """Import the wheel's code as it is, before it replaces anything. Raises VersionError: it is another release."""
    environment = {**os.environ, "PYTHONPATH": str(wheel)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", _SAY_RELEASE],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S * 4,
    )
    if done.stdout.split() != [release.version, str(release.protocol)]:
        raise VersionError(f"the control plane's wheel is not the release that it says: {done.stderr.strip()[-300:]}")


def install(wheel: Path, python: str = sys.executable) -> None:
    """Install a wheel into the environment of this interpreter, by uv or pip. Raises VersionError."""
    for command in _installers(wheel, python):
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=INSTALL_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise VersionError(f"the wheel cannot be installed: {error}") from error
        if done.returncode:
            raise VersionError(f"the wheel cannot be installed: {done.stderr.strip()[-500:]}")


def _installers(wheel: Path, python: str) -> list[list[str]]:
    """The commands that install it, also over the same version with other code."""
    uv = os.environ.get("UV") or shutil.which("uv")  # uvx names itself to what it starts
    if uv:
        again = ["--reinstall-package", DISTRIBUTION]
        return [[uv, "pip", "install", "--quiet", *again, "--python", python, str(wheel)]]
    if importlib.util.find_spec("pip") is None:
        raise VersionError("neither uv nor pip is here to install the control plane's wheel: install uv")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    return [[*pip, str(wheel)], [*pip, "--force-reinstall", "--no-deps", str(wheel)]]
