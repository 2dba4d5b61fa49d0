"""Detects and removes secrets in addresses. Pure."""

import ipaddress
import re
from urllib.parse import parse_qs, urlsplit

GATEWAY_PATH = "v1/gateway"
"""Where the control plane takes WebSockets of invited machines, below its own address."""
FORWARDED = "gateway.sock"
"""The name of a unix socket that leads to a broker elsewhere, through a gateway."""
_CREDENTIALS = re.compile(r"^(\w+://)?.*@", re.DOTALL)  # up to the last @: a password may hold what ends a host
_SECRETS = {"password", "token", "key"}


def has_secret(address: str) -> bool:
    """Whether the address holds credentials."""
    return "@" in address or bool(parse_qs(address.partition("?")[2]).keys() & _SECRETS)


def without_secret(address: str) -> str:
    """The address without credentials, query and fragment, for display."""
    return re.split("[?#]", _CREDENTIALS.sub(r"\1", address))[0]


def is_loopback_url(url: str) -> bool:
    """Whether the address is on this machine's loopback interface."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
