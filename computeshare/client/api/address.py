"""A control plane's address and token, and the errors raised when it does not answer."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx2

from computeshare import __version__
from computeshare.errors import ComputeShareError, SettingsError
from computeshare.transport.addresses import is_loopback_url

SILENCE_S = 45.0
"""Seconds of silence after which an event stream counts as lost; the server pings every 15 s."""


class NoServer(ComputeShareError):
    """No control plane answers at this address."""


@contextmanager
def outages(url: str) -> Iterator[None]:
    """Turn failures of the HTTP connection into NoServer."""
    try:
        yield
    except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
        raise NoServer(
            f"no control plane answers at {url} ({error}): start `computeshare up` there, "
            "or set COMPUTESHARE_URL to where it runs"
        ) from error
    except httpx2.TimeoutException as error:
        raise NoServer(f"{url} did not answer in time: try again, or see `computeshare doctor`") from error
    except httpx2.RequestError as error:
        raise NoServer(f"the connection to {url} broke ({error}): try again") from error


def connection(url: str, token: str | None, timeout_s: float) -> dict[str, Any]:
    """Arguments for an HTTP client of a control plane. Raises SettingsError: the token is malformed."""
    headers = {"Accept": "application/json", "User-Agent": f"computeshare/{__version__}"}
    if token:
        headers["Authorization"] = f"Bearer {checked_token(token)}"
    # A proxy from the environment cannot reach this machine's loopback.
    return {"base_url": url, "headers": headers, "timeout": timeout_s, "trust_env": not is_loopback_url(url)}


def resumed(connection: Mapping[str, Any], after: int | None) -> dict[str, Any]:
    """Arguments of the request for an event stream that continues after event `after`."""
    headers = {} if after is None else {"Last-Event-ID": str(after)}
    return {"headers": headers, "timeout": httpx2.Timeout(connection["timeout"], read=SILENCE_S)}


def checked_url(url: str) -> str:
    """The address without a trailing slash. Raises SettingsError: it is not http://HOST:PORT or https://HOST:PORT."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise SettingsError(f"{url!r} is not the address of a control plane: give http://HOST:PORT")
    return url.rstrip("/")


def checked_token(token: str) -> str:
    """The token. Raises SettingsError: it holds characters other than printable ASCII."""
    if not (token.isascii() and token.isprintable()):
        raise SettingsError(
            "the token contains characters that tokens never have: check COMPUTESHARE_TOKEN or HOME/token"
        )
    return token
