"""What is secret in an address, and the address without it. Pure."""

import re
from urllib.parse import parse_qs

_CREDENTIALS = re.compile(r"^(\w+://)?.*@", re.DOTALL)  # up to the last @: a password may hold what ends a host
_SECRETS = {"password", "token", "key"}


def has_secret(address: str) -> bool:
    """Whether there is anything in the address that not everybody may read."""
    return "@" in address or bool(parse_qs(address.partition("?")[2]).keys() & _SECRETS)


def without_secret(address: str) -> str:
    """The address as people may see it: without credentials, query and fragment."""
    return re.split("[?#]", _CREDENTIALS.sub(r"\1", address))[0]
