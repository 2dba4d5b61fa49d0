"""`computeshare up --lan` finds its address, and says where machines join."""

import ipaddress
import socket

import pytest

from computeshare.errors import SettingsError
from computeshare.up import lan_address as module
from computeshare.up.lan_address import lan_address
from computeshare.up.stack import UpOptions


def test_the_address_is_one_of_this_machine_that_others_may_reach() -> None:
    try:
        address = lan_address()
    except SettingsError as error:  # a machine without a network
        assert "--public-url" in str(error)
        return
    assert not ipaddress.ip_address(address).is_loopback
    with socket.create_server((address, 0)) as listener, socket.create_connection(listener.getsockname()[:2], 5):
        pass


def test_a_machine_without_a_network_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_towards_others", lambda: "")
    monkeypatch.setattr(module, "_of_interfaces", lambda: ["127.0.0.1", "169.254.3.4"])
    with pytest.raises(SettingsError, match=r"no address on a local network; .*, or leave out --lan$"):
        lan_address()
    monkeypatch.setattr(module, "_of_interfaces", lambda: ["127.0.0.1", "192.168.7.5"])
    assert lan_address() == "192.168.7.5"


def test_lan_is_https_at_that_address_with_a_certificate_made_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_towards_others", lambda: "192.168.7.5")
    settings = UpOptions(lan=True, tls_port=9443).settings()
    assert (settings.public_url, settings.tls) == ("https://192.168.7.5:9443", "self")
    with pytest.raises(SettingsError, match="leave out --public-url"):
        UpOptions(lan=True, public_url="https://home.example").settings()
