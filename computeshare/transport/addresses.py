"""Detects and removes secrets in addresses. Pure."""

import re
from urllib.parse import parse_qs

_CREDENTIALS = re.compile(r"^(\w+://)?.*@", re.DOTALL)  # up to the last @: a password may hold what ends a host
_SECRETS = {"password", "token", "key"}


def has_secret(address: str) -> bool:
    """Whether the address holds credentials."""
    return "@" in address or bool(parse_qs(address.partition("?")[2]).keys() & _SECRETS)


def without_secret(address: str) -> str:
    """The address without credentials, query and fragment, for display."""
    return re.split("[?#]", _CREDENTIALS.sub(r"\1", address))[0]
