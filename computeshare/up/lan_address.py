"""This machine's address on its local network."""

import ipaddress
import socket

import psutil

from computeshare.errors import SettingsError

ELSEWHERE = "192.0.2.1"
"""An address that no machine has (RFC 5737)."""


def lan_address() -> str:
    """The IPv4 address by which machines on the same network reach this one: that of the default route, else the first
    private one of an interface.

    Raises: SettingsError: there is none.
    """
    for address in (_towards_others(), *_of_interfaces()):
        if address and _is_of_a_network(address):
            return address
    raise SettingsError(
        "--lan: this machine has no address on a local network; connect it, name an address by --public-url, or leave "
        "out --lan"
    )


def _towards_others() -> str:
    """The address from which this machine would send to others; empty if it cannot send. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((ELSEWHERE, 9))
            return str(asking.getsockname()[0])
        except OSError:
            return ""


def _of_interfaces() -> list[str]:
    found = [one.address for of in psutil.net_if_addrs().values() for one in of if one.family == socket.AF_INET]
    return [address for address in found if ipaddress.ip_address(address).is_private]


def _is_of_a_network(address: str) -> bool:
    found = ipaddress.ip_address(address)
    return not (found.is_loopback or found.is_link_local or found.is_unspecified)
