"""Restricts webhooks to addresses of the public internet and of the networks that the setting allows, against
server-side request forgery. Pure but for `look_up` and the thread in `reachable`.
"""

import ipaddress
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from computeshare.errors import ComputeShareError, SettingsError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Networks = Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network]
Resolve = Callable[[str, int], Sequence[str]]
"""A function from a host's name and a port to the host's addresses; raises OSError."""

MOST_ADDRESSES = 4
PATIENCE_S = 5.0
"""The most seconds for the look-up of a host's addresses."""
VARIABLE = "COMPUTESHARE_WEBHOOK_NETWORKS"
_INNER = [
    ipaddress.ip_network(text)
    for text in (
        "::/96",  # these hold an IPv4 address, which may be any
        "::ffff:0:0/96",
        "64:ff9b::/96",
        "64:ff9b:1::/48",
        "2001::/23",
        "2002::/16",
        "192.0.0.0/24",
        "192.88.99.0/24",
        "168.63.129.16/32",  # a cloud's metadata, at a public address
        "3fff::/20",  # for documentation
        "5f00::/16",  # segment routing within a network
        "fec0::/10",
    )
]
"""Networks that `ipaddress` calls global in some version of Python, and that are not public, or embed an IPv4
address."""


class ForbiddenAddress(ComputeShareError):
    """A webhook's host has an address that webhooks may not reach."""


def networks_of(text: str) -> Networks:
    """Parse the setting: networks separated by commas. Raises SettingsError."""
    try:
        return [ipaddress.ip_network(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise SettingsError(
            f"{VARIABLE}: {error}; write networks separated by commas, for example 192.168.1.0/24,127.0.0.1"
        ) from error


def is_allowed(text: str, allowed: Networks) -> bool:
    """Whether a webhook may reach this address: it is public, or in an `allowed` network. False for text that is no
    address.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return any(address in network for network in allowed) or _is_public(address)


def _is_public(address: Address) -> bool:
    special = address.is_multicast or address.is_reserved or address.is_unspecified or address.is_link_local
    return address.is_global and not special and not any(address in network for network in _INNER)


def look_up(host: str, port: int) -> Sequence[str]:
    """A host's addresses from this machine's resolver, best first. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(place[4][0]) for place in found))


def reachable(
    host: str, port: int, allowed: Networks, resolve: Resolve = look_up, patience_s: float = PATIENCE_S
) -> Sequence[str]:
    """A host's first `MOST_ADDRESSES` addresses, all checked. The caller must connect to them without another look-up,
    whose answer could differ (DNS rebinding).

    Raises: ForbiddenAddress: a webhook may not reach one of them. OSError: no address was found, or not in time.
    """
    try:
        found = _in_time(resolve, host, port, patience_s)[:MOST_ADDRESSES]
    except UnicodeError as error:  # the name cannot be encoded for DNS
        raise OSError("not a host name") from error
    for address in found:
        if not is_allowed(address, allowed):
            raise ForbiddenAddress(
                f"{host} has the address {address}, which is not on the public internet: "
                f"to allow it, start the control plane with {VARIABLE}={address}"
            )
    if not found:
        raise OSError("the host has no address")
    return found


def _in_time(resolve: Resolve, host: str, port: int, patience_s: float) -> Sequence[str]:
    """Call `resolve` in a thread of its own, because it cannot be interrupted. Raises OSError after `patience_s`; the
    thread is then left to end by itself.
    """
    answer: Future[Sequence[str]] = Future()

    def ask() -> None:
        try:
            answer.set_result(resolve(host, port))
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=ask, name="resolver", daemon=True).start()
    try:
        return answer.result(patience_s)
    except TimeoutError as error:
        raise OSError(f"no address was found within {patience_s:.2g} s") from error
