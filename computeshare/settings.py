"""Settings: `COMPUTESHARE_*` variables, the home folder, and `run.json`.

Only entry points read settings; all other modules get plain values.
"""

import hmac
import ipaddress
import json
import secrets
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import platformdirs
from pydantic import BaseModel, Field, StringConstraints, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from computeshare.errors import NoToken, SettingsError, Unreachable
from computeshare.runtime.database_file import DatabaseFile
from computeshare.runtime.private_files import write_private
from computeshare.runtime.signatures import PUBLIC_KEY, SigningKey
from computeshare.types import plain_message

EVERYWHERE = frozenset({"0.0.0.0", "::"})
"""Wildcard addresses: a server can listen on them, but a client cannot connect to them."""
LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
"""This machine's names for itself."""
NEARBY_DOMAINS = (".local", ".lan", ".home", ".home.arpa", ".internal")
"""Ends of names that only a local network knows."""
Person = Annotated[
    str, StringConstraints(strip_whitespace=True, min_length=1, max_length=60, pattern=r"^[^\x00-\x1f\x7f]+$")
]
"""A person's name, on one line."""
BrokerUser = Literal["owner", "api", "reducer", "evaluator", "worker"]
"""Names of the broker's users: for commands that a person gives, and for each role."""
INTERNAL = frozenset({"PARENT", "SOCKETS", "TELL", "FAILPOINTS"})
"""Further variables `COMPUTESHARE_<NAME>`: those that processes set for one another, and the one that tests set."""


def _default_home() -> Path:
    return Path(platformdirs.user_data_dir("computeshare", appauthor=False))


class RunFile(BaseModel):
    """Addresses and process ids of `computeshare up`, for other commands (`$COMPUTESHARE_HOME/run.json`)."""

    url: str
    redis_url: str
    """The broker's address for its owner."""
    redis_urls: dict[str, str] = Field(default_factory=dict)
    """The same for each other user of the broker, if it has any."""
    pids: dict[str, list[int]] = Field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Replace the file in one step; only its owner may read it."""
        write_private(path, self.model_dump_json(indent=1))

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """The file's content; None if the file is missing or cannot be read."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValueError):
            return None


class Settings(BaseSettings):
    """Every setting; each field is the variable `COMPUTESHARE_<NAME>`."""

    model_config = SettingsConfigDict(env_prefix="COMPUTESHARE_", extra="ignore")

    home: Path = Field(default_factory=_default_home, description="database, checkpoints, token, run.json")
    data: Path | None = Field(None, description="data sets in torchvision's layout; default HOME/data")
    redis_url: str | None = Field(None, description="broker; default: the embedded one of `computeshare up`")
    gateway_redis_url: str | None = Field(
        None, description="broker's address for the gateway's machines, with the user `worker`; default: REDIS_URL"
    )
    public_redis_url: str | None = Field(
        None, description="broker's address for invited machines, in place of the gateway"
    )
    public_url: str | None = Field(None, description="control plane's address for invited machines: https://HOST")
    tls: Literal["self"] | None = Field(None, description="self: the API serves HTTPS with a certificate made here")
    tls_cert: Path | None = Field(None, description="certificate with which the API serves HTTPS, in PEM")
    tls_key: Path | None = Field(None, description="key of that certificate, in PEM")
    tls_port: int = Field(8443, ge=1, le=65535, description="port of HTTPS, on every address of the machine")
    database_url: str | None = Field(None, description="SQLite database; default HOME/computeshare.db")
    url: str | None = Field(None, description="address of the control plane, for clients")
    token: str | None = Field(None, description="bearer token, for clients; default: HOME/token")
    person: Person = Field(
        "owner",
        description="whose the machines are that joined without an invite, for the contributions by person",
    )
    webhook_networks: str = Field("", description="private networks that webhooks may reach: 192.168.1.0/24,127.0.0.1")
    copy_to: str | None = Field(None, description="where checkpoints are copied, by fsspec: s3://BUCKET/FOLDER")
    appendonly: bool = Field(False, description="append-only file for the embedded broker (durable, ten times slower)")
    name: str | None = Field(None, description="what the pages call a worker; default its host name")
    device: str | None = Field(
        None,
        description="what a worker computes with: cuda (all GPUs), cuda:1, mps, cpu, cuda:0,cuda:1; default the best",
    )
    labels: str = Field("", description="a worker's labels, for jobs that ask for them: room=attic,floor=2")
    max_up: str | None = Field(None, description="how fast a worker sends at most, in bits per second: 5mbit")
    max_memory: str | None = Field(None, description="what a job may take of a worker's memory: 8GB, 512MiB")
    cache: str | None = Field(None, description="how much fetched data a worker keeps: 100GB; default 50 GB or less")
    control_key: str = Field(
        "",
        pattern=rf"^({PUBLIC_KEY})?$",
        description="control plane's public key, by which workers check what it signed; default the invite's",
    )
    recipes: bool = Field(False, description="whether this machine runs recipes, the code of users, in confinement")
    recipe: str = Field("", description="single recipes that a worker runs, by their digests: sha256:...,sha256:...")
    evaluator: bool = Field(True, description="whether `up` starts an evaluator; without one, idle workers score")
    unconfined: bool = Field(False, description="whether recipes run even where nothing can confine them")
    step_limit: float = Field(600, gt=0, description="how many seconds a step of a recipe may take on this machine")
    upgrade: bool = Field(False, description="whether a worker installs the control plane's version in its place")
    nice: int = Field(0, ge=0, le=19, description="CPU priority of a worker's computing: 0 normal, 19 lowest")

    @classmethod
    def given(cls, **flags: object) -> Self:
        """Settings in which flags override variables; a flag that is None was not given.

        Raises: SettingsError, with a line for each variable that is wrong.
        """
        values: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
        try:
            return cls(**values)
        except ValidationError as error:
            told = (f"COMPUTESHARE_{str(one['loc'][0]).upper()}: {plain_message(one['msg'])}" for one in error.errors())
            raise SettingsError("\n".join(told)) from error

    @property
    def data_dir(self) -> Path:
        return self.data or self.home / "data"

    @property
    def artifacts_dir(self) -> Path:
        return self.home / "artifacts"

    @property
    def bundles_dir(self) -> Path:
        return self.home / "bundles"

    @property
    def run_path(self) -> Path:
        return self.home / "run.json"

    @property
    def token_path(self) -> Path:
        return self.home / "token"

    @property
    def control_key_path(self) -> Path:
        """The file with the control plane's public key."""
        return self.home / "control.pub"

    @property
    def sqlite_url(self) -> str:
        url = self.database_url or f"sqlite:///{self.home / 'computeshare.db'}"
        if not url.startswith("sqlite:///"):
            raise SettingsError(f"COMPUTESHARE_DATABASE_URL must start with sqlite:///, not {url.split(':')[0]}:")
        return url

    @property
    def database_file(self) -> DatabaseFile:
        """The database's path and the folder of its backups."""
        return DatabaseFile(Path(self.sqlite_url.removeprefix("sqlite:///").partition("?")[0]), self.home / "backups")

    def resolve_redis_url(self, user: BrokerUser) -> str:
        """The broker's address: from the setting, else a user's from `run.json`. Raises Unreachable: neither has it."""
        if self.redis_url:
            return self.redis_url
        if run := RunFile.read(self.run_path):
            return run.redis_urls.get(user, run.redis_url)
        raise Unreachable(
            "no broker is known: start `computeshare up` on this machine, or set COMPUTESHARE_REDIS_URL "
            "(for example redis://worker:PASSWORD@HOST:6379/0)"
        )

    def resolve_gateway_redis_url(self) -> str:
        """The broker's address for the machines behind the gateway. Raises Unreachable, as `resolve_redis_url`."""
        return self.gateway_redis_url or self.resolve_redis_url("worker")

    def resolve_public_url(self) -> str | None:
        """The control plane's address for machines elsewhere, without a final slash; None: none was set.

        Raises: SettingsError: it is no such address, or would send secrets unencrypted over a network.
        """
        if not self.public_url:
            return None
        url = self.public_url.rstrip("/")
        if not is_gateway_url(url):
            raise SettingsError(
                "COMPUTESHARE_PUBLIC_URL must be https://HOST or https://HOST:PORT, without a path "
                "(http:// for this machine's loopback alone)"
            )
        return url

    def resolve_url(self) -> str:
        """The control plane's address: from the setting, else from `run.json`. Raises Unreachable: neither has it."""
        if self.url:
            return self.url.rstrip("/")
        if run := RunFile.read(self.run_path):
            return run.url
        raise Unreachable("Can't find a control plane. Start one: `computeshare up`, or set COMPUTESHARE_URL")

    def resolve_token(self) -> str:
        """The bearer token: from the setting, else from the token file. Raises NoToken: neither has it."""
        if self.token:
            return self.token
        try:
            return self.token_path.read_text().strip()
        except OSError as error:
            raise NoToken(
                f"no token in {self.token_path}: set COMPUTESHARE_TOKEN to what `computeshare token` prints on the "
                "control plane's machine, or ask its owner for a token of your own"
            ) from error

    def ensure_token(self) -> str:
        """The control plane's token, created on first use in a file of mode 0600."""
        if self.token:
            write_private(self.token_path, self.token + "\n")
        elif not self.token_path.exists():
            write_private(self.token_path, secrets.token_urlsafe(32) + "\n")
        return self.token_path.read_text().strip()

    def ensure_signing_key(self) -> SigningKey:
        """The control plane's private key, made at the first use in a file of mode 0600; beside it the public key.

        Raises: SettingsError.
        """
        key = SigningKey.kept(self.home / "control.key")
        if self._stored_control_key() != key.public:
            write_private(self.control_key_path, key.public + "\n")
        return key

    def resolve_control_key(self) -> str:
        """The control plane's public key: from the setting, else from this home; empty: neither has it."""
        return self.control_key or self._stored_control_key()

    def _stored_control_key(self) -> str:
        try:
            return self.control_key_path.read_text().strip()
        except OSError:
            return ""

    def child_environment(self) -> dict[str, str]:
        """These settings as variables for a child process (never as arguments, which other users can read)."""
        values = json.loads(self.model_dump_json(exclude_none=True))
        return {f"COMPUTESHARE_{name.upper()}": str(value) for name, value in values.items()}


def is_gateway_url(url: str, nearby: bool = False) -> bool:
    """Whether this is an address under which a gateway may be used: encrypted, or this machine's own; no path.

    With `nearby`, also one of a local network, unencrypted.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return False
    if not parts.hostname or "@" in parts.netloc or parts.path or parts.query or parts.fragment:
        return False
    if parts.scheme == "http" and nearby and _is_nearby(parts.hostname):
        return True
    return parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in LOOPBACK_NAMES)


def _is_nearby(host: str) -> bool:
    """Whether a host's name or address is one that only a local network knows."""
    try:
        return ipaddress.ip_address(host).is_private
    except ValueError:
        return "." not in host or host.endswith(NEARBY_DOMAINS)


def derive(token: str, purpose: str) -> str:
    """HMAC-SHA256 of `purpose` under the token, in hex: a credential that does not reveal the token."""
    return hmac.new(token.encode(), purpose.encode(), "sha256").hexdigest()


def login_path(token: str) -> str:
    """The path and query of the link that logs a browser in."""
    return f"/login?key={derive(token, 'login')}"
