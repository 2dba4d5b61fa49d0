"""No part of a password is shown, whatever is in it, and none is taken for a host."""

import pytest

from computeshare.errors import SettingsError
from computeshare.transport.addresses import has_secret, without_secret
from computeshare.transport.connections import connect


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("redis://:hunter2@host:6379/0", "redis://host:6379/0"),
        ("rediss://ada:hunter2@host", "rediss://host"),
        ("redis://:hun/ter2@host:6379/0", "redis://host:6379/0"),
        ("redis://:hun#ter2@host", "redis://host"),
        ("redis://:hun?ter2@host", "redis://host"),
        ("redis://:hun@ter2@host", "redis://host"),
        ("unix://:hunter2@/tmp/broker.sock", "unix:///tmp/broker.sock"),
        ("redis://host?password=hunter2", "redis://host"),
        (":hunter2@host", "host"),
    ],
)
def test_what_stands_before_the_last_at_is_secret(address: str, shown: str) -> None:
    assert has_secret(address) and without_secret(address) == shown


@pytest.mark.parametrize("address", ["redis://host:6379/0", "unix:///tmp/broker.sock", "nonsense", ""])
def test_an_address_without_secrets_is_shown_as_it_is(address: str) -> None:
    assert not has_secret(address) and without_secret(address) == address


@pytest.mark.parametrize("character", "/?#")
def test_a_password_that_would_cut_its_address_short_is_refused_and_not_quoted(character: str) -> None:
    for secret in (f"hun{character}ter2", f"12{character}ter2", f"x@hun{character}ter2"):
        with pytest.raises(SettingsError, match=r"what the password has of / \? # @ is written %2F") as refused:
            connect(f"redis://:{secret}@host:6379/0")
        assert "hun" not in str(refused.value) and "ter2" not in str(refused.value)


def test_what_is_no_address_of_a_broker_is_told_with_an_example() -> None:
    with pytest.raises(
        SettingsError, match=r"nonsense is no address of a broker: give redis://USER:PASSWORD@HOST:6379/0"
    ):
        connect("nonsense")


def test_a_broker_is_waited_for_as_long_as_is_asked() -> None:
    options = connect("redis://host", retries=0, timeout_s=1.0).connection_pool.connection_kwargs
    assert (options["socket_timeout"], options["socket_connect_timeout"]) == (1.0, 1.0)
    usual = connect("redis://host").connection_pool.connection_kwargs
    assert (usual["socket_timeout"], usual["socket_connect_timeout"]) == (10.0, 5.0)
