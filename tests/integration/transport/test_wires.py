"""Two connections to one broker: which is taken for what, and when there is but one."""

import os
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.retry import Retry

from computeshare.protocol.channel import Channel
from computeshare.transport.connections import by_loopback
from computeshare.transport.wire import Wire, Wires
from computeshare.up.embedded_broker import EmbeddedBroker

LIFE_S = 60


@pytest.fixture
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    broker = EmbeddedBroker.start(tmp_path_factory.mktemp("wires") / "broker.log")
    yield broker
    broker.stop()


@pytest.fixture
def client(broker: EmbeddedBroker) -> Iterator[Redis]:
    with closing(client_of(broker.url)) as client:
        yield client


def client_of(url: str) -> Redis:
    return Redis.from_url(url, retry=Retry(NoBackoff(), 0), socket_timeout=5)


def test_beside_a_unix_socket_short_exchanges_go_by_tcp_to_the_same_broker(client: Redis) -> None:
    with closing(by_loopback(client)) as near:
        assert "path" not in near.connection_pool.connection_kwargs
        near.set("k", "v")
        assert client.get("k") == b"v"
        assert near.get_retry() is client.get_retry()  # outages are waited out alike


def test_a_client_by_tcp_is_taken_as_it_is(broker: EmbeddedBroker) -> None:
    with closing(client_of(broker.tcp_url)) as client:
        assert by_loopback(client) is client


def test_a_broker_that_listens_on_its_unix_socket_alone_is_reached_by_that(client: Redis) -> None:
    client.config_set("port", 0)
    assert by_loopback(client) is client


def test_another_broker_at_that_port_is_not_taken_for_this_one(
    client: Redis, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = EmbeddedBroker.start(tmp_path_factory.mktemp("other") / "broker.log")
    try:
        port, password = other.place.port, client.connection_pool.connection_kwargs["password"]
        with closing(client_of(other.tcp_url)) as there:
            there.acl_setuser("owner", enabled=True, passwords=f"+{password}")
        client.config_set("bind", "127.0.0.2" if sys.platform == "linux" else "::1")
        client.config_set("port", port)
        assert client.info("server")["tcp_port"] == port
        assert by_loopback(client) is client
    finally:
        other.stop()


def test_a_user_who_may_not_ask_keeps_to_the_unix_socket(broker: EmbeddedBroker, client: Redis) -> None:
    client.acl_setuser("few", enabled=True, passwords="+word", keys="*", commands=["+get"])
    url = broker.url.replace("unix://owner:", "unix://few:").replace(broker.place.password, "word")
    with closing(client_of(url)) as few:
        assert few.get("k") is None
        assert by_loopback(few) is few


def test_a_broker_that_is_away_is_an_error(broker: EmbeddedBroker, client: Redis) -> None:
    broker.stop()
    with pytest.raises(RedisConnectionError):
        by_loopback(client)


def test_large_values_go_over_their_own_wire_and_the_rest_does_not(client: Redis) -> None:
    with closing(by_loopback(client)) as near:
        wires = Wires.to(client, near)
        channel, part = Channel(client, wires), os.urandom(1 << 20)
        channel.run_staged({"small": [b"few"]}, LIFE_S, ["HLEN", "small"])
        assert (wires.short.bytes_sent > 0, wires.large.bytes_sent) == (True, 0)
        sent = wires.short.bytes_sent
        assert channel.run_staged({"large": [part] * 5}, LIFE_S, ["HLEN", "large"]) == [5]
        assert wires.large.bytes_sent > 5 * len(part) and wires.short.bytes_sent < sent + 1000
        received, room = wires.short.bytes_received, [memoryview(bytearray(len(part))) for _ in range(5)]
        assert channel.read("large", 5, room) == ([part] * 5, [])
        assert wires.large.bytes_received > 5 * len(part) and wires.short.bytes_received == received
        assert channel.read("small", 1) == ([b"few"], [])
        assert wires.bytes_sent == wires.short.bytes_sent + wires.large.bytes_sent
        assert wires.bytes_received == wires.short.bytes_received + wires.large.bytes_received
        for wire in (wires.short, wires.large):
            wire.close()


def test_one_wire_for_all_is_counted_once(client: Redis) -> None:
    wires = Wires.to(client)
    assert isinstance(wires.short, Wire) and wires.short is wires.large
    wires.short.exchange([["PING"]])
    assert wires.bytes_sent == wires.short.bytes_sent
    wires.short.close()
