"""Takes up an invite: exchanges its link, once, for a way to the broker, and stores that for later starts.

At a gateway, the machine proves who it is by a key pair that it has made; the private key is never sent.
"""

import hashlib
import json
import re
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import structlog

from computeshare.errors import SettingsError, Unreachable
from computeshare.runtime.private_files import write_private
from computeshare.runtime.signatures import SigningKey
from computeshare.settings import Settings, is_gateway_url
from computeshare.transport.addresses import GATEWAY_PATH, is_loopback_url, without_secret
from computeshare.transport.forwarder import Forwarder, GatewayAccess, trust
from computeshare.transport.machine_key import MachineKey

TIMEOUT_S = 15.0
NO_INVITE = "this is no invite's link; copy it from the job's page"
NO_ANSWER = "no control plane answers there; check that it runs, and that this machine is on its network"
_LINK = re.compile(r"(https?://[^/#]+)(?:/join/|/?#)([A-Za-z0-9_-]+)$")
log = structlog.get_logger()
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Joined:
    """Content of an invite: the broker's address, or access to a gateway; the queue to serve; the control plane's key.

    Args:
        control_key: the public key by which the control plane signs; empty: it is not known.
    """

    queue: str = ""
    redis_url: str = ""
    gateway: GatewayAccess | None = None
    control_key: str = ""

    @property
    def machine(self) -> str:
        """The id that the control plane gave to this machine; empty without a gateway."""
        return self.gateway.machine if self.gateway else ""

    @property
    def shown(self) -> str:
        """The address of the gateway or of the broker, without secrets."""
        return self.gateway.url if self.gateway else without_secret(self.redis_url)

    @contextmanager
    def broker_url(self, on_refusal: Callable[[Forwarder, str], None] = lambda _, __: None) -> Iterator[str]:
        """The broker's address: a forwarder's, which runs meanwhile, if the broker is reached through a gateway.

        `on_refusal` is called, from another thread, if the gateway refuses this machine; with the reason.
        """
        if self.gateway is None:
            yield self.redis_url
            return
        with Forwarder(self.gateway, lambda why: on_refusal(forwarder, why)) as forwarder:
            yield forwarder.redis_url

    @classmethod
    def parse(cls, kept: Any, key: MachineKey) -> "Joined | None":
        """From the file's entry; None: the entry is not valid. (Earlier versions stored the broker's address alone.)"""
        if isinstance(kept, str):
            return cls(redis_url=kept)
        try:
            gateway = kept.get("gateway")
            access = GatewayAccess(**gateway, key=key) if gateway else None
            return cls(kept["queue"], kept["redis_url"], access, kept.get("control_key", ""))
        except (AttributeError, KeyError, TypeError):
            return None

    def entry(self) -> dict[str, Any]:
        """As the file's entry, which holds no key."""
        way = self.gateway
        gateway = {"url": way.url, "machine": way.machine, "certificate": way.certificate} if way else None
        return {
            "queue": self.queue,
            "redis_url": self.redis_url,
            "gateway": gateway,
            "control_key": self.control_key,
        }


def join(url: str, name: str, home: Path, fingerprint: str = "") -> Joined:
    """Take up an invite: return its content as stored at an earlier start, else as requested from the control plane.

    Args:
        url: the invite's link, `https://HOST#CODE` or `https://HOST/join/CODE`.
        name: this machine's name.
        home: the folder of the file that stores the result, which only its owner can read.
        fingerprint: SHA-256 of the only certificate that the control plane may have, in hex; empty: one that this
            system trusts.
    Raises: Unreachable: no control plane answers. SettingsError: the invite is not valid, or `home` cannot be written.
    """
    if not (link := _LINK.match(url)):
        raise SettingsError(f"--join {_shown(url)}: {NO_INVITE}")
    base, code = link.groups()
    url = f"{base}/join/{code}"
    invite = hashlib.sha256(url.encode()).hexdigest()
    known, key = _kept(home), _key(home, invite)
    if found := Joined.parse(known.get(invite), key):
        return found
    certificate = _pinned(base, fingerprint) if fingerprint else ""
    _keep(home, known)  # fails here, if at all: before the invite is used up
    said = _request(url, introduction(name, code, key.current()), certificate, f"--join {_shown(url)}")
    joined = _joined(url, said, key, certificate)
    _keep(home, known | {invite: joined.entry()})
    return joined


def introduction(name: str, code: str, key: SigningKey) -> dict[str, str]:
    """The request with which a machine takes up an invite. The control plane repeats its answer for the same key."""
    return {"name": name[:100], "public_key": key.public, "signature": key.sign("join", code, key.public)}


def replace_key(access: GatewayAccess) -> None:
    """Make a new key for this machine at a gateway, which accepts the old one no longer.

    If the answer is lost, either key works here: the next connection finds out which one the control plane knows.

    Raises: Unreachable: no control plane answers. SettingsError: it refuses this machine, or no key can be stored.
    """
    base = access.url.removesuffix(f"/{GATEWAY_PATH}")
    old, new = access.key.current(), access.key.next()
    change = {"public_key": new.public, "signature": old.sign("rotate", access.machine, new.public)}
    _request(f"{base}/join/machines/{access.machine}/key", change, access.certificate, f"--rotate-key: {base}")
    access.key.accept(new)


def last_joined(settings: Settings) -> Joined:
    """How a worker reaches the broker: by the settings, else by the invite taken up last.

    Raises: Unreachable: nothing is known.
    """
    try:
        url = settings.resolve_redis_url("worker")
        # A broker that is named may be another control plane's than this home's.
        key = settings.control_key if settings.redis_url else settings.resolve_control_key()
        return Joined(redis_url=url, control_key=key)
    except Unreachable as error:
        home = settings.home
        for invite, kept in reversed(_kept(home).items()):
            if found := Joined.parse(kept, _key(home, invite)):
                return found
        raise Unreachable(f"{error}, or take up an invite: computeshare-worker --join LINK") from error


def _pinned(base: str, fingerprint: str) -> str:
    """The control plane's certificate (PEM), if it has this fingerprint. Raises SettingsError, Unreachable."""
    wanted = fingerprint.replace(":", "").lower()
    if not _FINGERPRINT.fullmatch(wanted):
        raise SettingsError("--tls-fingerprint must be 64 hexadecimal digits: copy it from the invite")
    parts = urlsplit(base)
    if parts.scheme != "https" or not parts.hostname:
        raise SettingsError("--tls-fingerprint needs a link that starts with https://")
    try:
        certificate = ssl.get_server_certificate((parts.hostname, parts.port or 443), timeout=TIMEOUT_S)
    except OSError as error:
        raise Unreachable(f"--join {base}: {NO_ANSWER} ({error})") from error
    if hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate)).hexdigest() != wanted:
        raise SettingsError(
            f"--join {base}: the server has another certificate than the invite says. Ask for a new invite; if that "
            "does not help, somebody between you and the control plane may be intercepting the connection"
        )
    return certificate


def _request(url: str, body: dict[str, str], certificate: str, told: str) -> dict[str, Any]:
    """Send a request without a token; returns the answer, empty if it is no JSON object.

    Args:
        told: the flag and the address without secrets, for messages.
    Raises: Unreachable: no control plane answers. SettingsError: it refuses.
    """
    try:
        # A proxy from the environment cannot reach this machine's loopback.
        how: dict[str, Any] = {"timeout": TIMEOUT_S, "trust_env": not is_loopback_url(url)}
        answer = httpx2.post(url, json=body, verify=trust(certificate), **how)
    except (httpx2.InvalidURL, ValueError) as error:
        raise SettingsError(f"{told}: {NO_INVITE}") from error
    except httpx2.HTTPError as error:
        raise Unreachable(f"{told}: {NO_ANSWER} ({error})") from error
    try:
        found = answer.json()
    except ValueError:
        found = None
    said: dict[str, Any] = found if isinstance(found, dict) else {}
    if answer.status_code >= 500:
        raise Unreachable(f"{told}: {said.get('detail') or answer.reason_phrase}: try again later")
    if not answer.is_success:
        raise SettingsError(f"{told}: {said.get('detail') or NO_INVITE}")
    return said


def _joined(url: str, said: dict[str, Any], key: MachineKey, certificate: str) -> Joined:
    """The content of an invite, from the control plane's answer. Raises SettingsError."""
    names = ("queue", "redis_url", "gateway", "machine", "control_key")
    given = [said.get(name) or "" for name in names]
    queue, redis_url, gateway, machine, control_key = given
    if not all(isinstance(each, str) for each in given) or not (redis_url or gateway):
        raise SettingsError(f"--join {_shown(url)}: {NO_INVITE}")
    if redis_url:
        return Joined(queue, redis_url, None, control_key)
    base = url.partition("/join/")[0]
    if not is_gateway_url(base, nearby=True):
        raise SettingsError(f"--join {_shown(url)}: use the link that starts with https://; this one is not encrypted")
    if not is_gateway_url(base):
        log.warning("the link is not encrypted: others on this network can read and change what this worker exchanges")
    return Joined(queue, "", GatewayAccess(f"{base}/{gateway}", machine, key, certificate), control_key)


def _key(home: Path, invite: str) -> MachineKey:
    """This machine's key for what an invite gave, another one for each, so that control planes cannot compare them."""
    return MachineKey(home / "machine-keys" / f"{invite[:16]}.key")


def _kept(home: Path) -> dict[str, Any]:
    """The contents of invites, by the sha256 of their links, newest last."""
    try:
        found = json.loads(_path(home).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _keep(home: Path, known: dict[str, Any]) -> None:
    try:
        write_private(_path(home), json.dumps(known))
    except OSError as error:
        raise SettingsError(f"{_path(home)} cannot be written: {error.strerror or error}") from error


def _path(home: Path) -> Path:
    return home / "joined.json"


def _shown(url: str) -> str:
    """The link without its code, for logs."""
    return re.split("/join/|#", url)[0] + "/..."
