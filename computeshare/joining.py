"""Taking up an invite: its link is exchanged for the broker's address, once, and kept for the next start."""

import hashlib
import json
import re
from pathlib import Path

import httpx2

from computeshare.errors import SettingsError
from computeshare.settings import write_private

TIMEOUT_S = 15.0
NO_INVITE = "this is no invite's link; copy it from the job's page"


def join(url: str, name: str, home: Path) -> str:
    """The broker's address that an invite gives, or gave at an earlier start of this machine's worker.

    Args:
        url: the invite's link.
        name: what this machine is called.
        home: where the address is kept, for its owner alone.
    Raises: SettingsError: nobody answers there, or the invite lets nobody in.
    """
    if not re.match(r"https?://[^/]+/(.*/)?join/[^/]+$", url):
        raise SettingsError(f"--join {_shown(url)}: {NO_INVITE}")
    kept = home / "joined.json"
    invite = hashlib.sha256(url.encode()).hexdigest()
    if address := _read(kept).get(invite):
        return address
    try:
        answer = httpx2.post(url, json={"name": name[:100]}, timeout=TIMEOUT_S)
        found = answer.json()
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise SettingsError(f"--join {_shown(url)}: no control plane answers there ({error})") from error
    except ValueError as error:
        raise SettingsError(f"--join {_shown(url)}: {NO_INVITE}") from error
    if not answer.is_success or not isinstance(found, dict) or not isinstance(found.get("redis_url"), str):
        why = found.get("detail") if isinstance(found, dict) else None
        raise SettingsError(f"--join {_shown(url)}: {why or NO_INVITE}")
    address = str(found["redis_url"])
    write_private(kept, json.dumps(_read(kept) | {invite: address}))
    return address


def _read(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _shown(url: str) -> str:
    """The link without its code, for logs."""
    return url.rpartition("/")[0] + "/..."
