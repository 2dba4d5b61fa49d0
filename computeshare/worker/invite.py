"""Takes up an invite: exchanges its link for the broker's address, once, and stores the address for later starts."""

import hashlib
import json
import re
import secrets
from pathlib import Path

import httpx2

from computeshare.client.api.address import is_loopback_url
from computeshare.errors import SettingsError, Unreachable
from computeshare.settings import Settings, derive, write_private

TIMEOUT_S = 15.0
NO_INVITE = "this is no invite's link; copy it from the job's page"


def join(url: str, name: str, home: Path) -> str:
    """The broker's address from an invite: stored at an earlier start, else requested from the control plane.

    Args:
        url: the invite's link.
        name: this machine's name.
        home: the folder of the file that stores the address, which only its owner can read.
    Raises: Unreachable: no control plane answers. SettingsError: the invite is not valid, or `home` cannot be written.
    """
    if not re.match(r"https?://[^/]+/(.*/)?join/[^/]+$", url):
        raise SettingsError(f"--join {_shown(url)}: {NO_INVITE}")
    invite = hashlib.sha256(url.encode()).hexdigest()
    known = _kept(home)
    if address := known.get(invite):
        return address
    _keep(home, known)  # fails here, if at all: before the invite is used up
    address = _exchange(url, {"name": name[:100], "key": _key(home, invite)})
    _keep(home, known | {invite: address})
    return address


def broker_url(settings: Settings) -> str:
    """The broker's address for a worker: from the settings, else from the invite taken up last.

    Raises: Unreachable: no address is known.
    """
    try:
        return settings.resolve_redis_url()
    except Unreachable as error:
        if known := _kept(settings.home):
            return list(known.values())[-1]
        raise Unreachable(f"{error}, or take up an invite: computeshare-worker --join LINK") from error


def _exchange(url: str, introduction: dict[str, str]) -> str:
    try:
        # A proxy from the environment cannot reach this machine's loopback.
        answer = httpx2.post(url, json=introduction, timeout=TIMEOUT_S, trust_env=not is_loopback_url(url))
    except (httpx2.InvalidURL, ValueError) as error:
        raise SettingsError(f"--join {_shown(url)}: {NO_INVITE}") from error
    except httpx2.HTTPError as error:
        raise Unreachable(f"--join {_shown(url)}: no control plane answers there ({error})") from error
    try:
        found = answer.json()
    except ValueError:
        found = None
    said = found if isinstance(found, dict) else {}
    if answer.status_code >= 500:
        raise Unreachable(f"--join {_shown(url)}: {said.get('detail') or answer.reason_phrase}: try again later")
    if not answer.is_success or not isinstance(said.get("redis_url"), str):
        raise SettingsError(f"--join {_shown(url)}: {said.get('detail') or NO_INVITE}")
    return str(said["redis_url"])


def _key(home: Path, invite: str) -> str:
    """This machine's secret for an invite, the same in every attempt: for it the control plane repeats its answer."""
    path = home / "joining.key"
    if not path.exists():
        write_private(path, secrets.token_hex(32))
    return derive(path.read_text(), invite)


def _kept(home: Path) -> dict[str, str]:
    """The stored broker addresses by the sha256 of their invite's link, newest last."""
    try:
        found = json.loads(_path(home).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _keep(home: Path, known: dict[str, str]) -> None:
    try:
        write_private(_path(home), json.dumps(known))
    except OSError as error:
        raise SettingsError(f"{_path(home)} cannot be written: {error.strerror or error}") from error


def _path(home: Path) -> Path:
    return home / "joined.json"


def _shown(url: str) -> str:
    """The link without its code, for logs."""
    return url.rpartition("/")[0] + "/..."
