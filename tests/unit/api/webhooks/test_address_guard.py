"""Where webhooks may go, and where not."""

import threading
from collections.abc import Sequence

import pytest

from api.webhooks.address_guard import ForbiddenAddress, is_allowed, networks_of, reachable
from computeshare.errors import SettingsError

PUBLIC = ("93.184.216.34", "8.8.8.8", "172.15.0.1", "172.32.0.1", "2606:2800:220:1:248:1893:25c8:1946", "2a00:1450::1")
FORBIDDEN = (
    "127.0.0.1", "127.255.0.9", "0.0.0.0", "0.1.2.3", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.5",
    "100.64.0.1", "169.254.169.254", "192.0.0.192", "192.0.2.1", "198.18.0.1", "198.51.100.7", "203.0.113.9",
    "224.0.0.1", "239.1.2.3", "240.0.0.1", "255.255.255.255", "100.100.100.200", "168.63.129.16", "192.88.99.1",
    "::", "::1", "::8.8.8.8", "::ffff:8.8.8.8", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "fe80::1", "fe80::1%eth0",
    "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "2001:db8::1", "2001::1", "2001:2::1", "2002:7f00:1::",
    "2002:808:808::", "64:ff9b::7f00:1", "64:ff9b::8.8.8.8", "64:ff9b:1::1", "100::1", "3fff::1", "5f00::1",
)  # fmt: skip
NO_ADDRESS = ("", "localhost", "2130706433", "0x7f.1", "127.1", "1.2.3.4.5", "[::1]", "8.8.8.8/32", "\x00")


@pytest.mark.parametrize("address", PUBLIC)
def test_the_public_internet_may_be_reached(address: str) -> None:
    assert is_allowed(address, [])


@pytest.mark.parametrize("address", [*FORBIDDEN, *NO_ADDRESS], ids=repr)
def test_every_other_address_is_refused(address: str) -> None:
    assert not is_allowed(address, [])


def test_networks_that_were_named_may_be_reached_and_no_others() -> None:
    allowed = networks_of("192.168.1.0/24, 127.0.0.1,fd00::/8,")
    assert all(is_allowed(address, allowed) for address in ("192.168.1.77", "127.0.0.1", "fd12::1", "8.8.8.8"))
    others = ("192.168.2.1", "127.0.0.2", "::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "169.254.169.254")
    assert not any(is_allowed(address, allowed) for address in others)


@pytest.mark.parametrize("text", ["true", "192.168.1.5/24", "10.0.0.0/33", "home"])
def test_a_setting_that_names_no_network_says_how_to_write_one(text: str) -> None:
    with pytest.raises(SettingsError, match=r"COMPUTESHARE_WEBHOOK_NETWORKS: .*192.168.1.0/24"):
        networks_of(text)


def names(*addresses: str) -> object:
    def resolve(host: str, port: int) -> Sequence[str]:
        assert (host, port) == ("hook.test", 443)
        return addresses

    return resolve


def test_a_host_with_one_forbidden_address_is_refused_whole_and_told_how_to_allow_it() -> None:
    with pytest.raises(ForbiddenAddress, match=r"10.0.0.9.*COMPUTESHARE_WEBHOOK_NETWORKS=10.0.0.9"):
        reachable("hook.test", 443, [], names("8.8.8.8", "10.0.0.9"))  # type: ignore[arg-type]


def test_only_a_few_addresses_of_a_host_are_tried() -> None:
    many = [f"8.8.8.{number}" for number in range(100)]
    assert reachable("hook.test", 443, [], names(*many)) == tuple(many[:4])  # type: ignore[arg-type]


def test_a_host_without_an_address_is_unknown() -> None:
    with pytest.raises(OSError, match="no address"):
        reachable("hook.test", 443, [], names())  # type: ignore[arg-type]


def test_a_resolver_that_does_not_answer_is_not_waited_for() -> None:
    over = threading.Event()

    def silent(host: str, port: int) -> Sequence[str]:
        over.wait(60)
        return ["8.8.8.8"]

    with pytest.raises(OSError, match=r"within 0\.05 s"):
        reachable("hook.test", 443, [], silent, patience_s=0.05)
    over.set()
