"""A broker that a script keeps busy refuses every command: for its clients it is away, and they wait for it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from computeshare.protocol.channel import Channel
from computeshare.transport.connections import connect
from computeshare.up.embedded_broker import EmbeddedBroker
from tests.support.runaway_script import busy_broker

BUSY_S = 0.5


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    broker = EmbeddedBroker.start(tmp_path_factory.mktemp("busy") / "broker.log")
    yield broker.url
    broker.stop()


def done_while_busy(url: str, call: Callable[[], Any]) -> Any:
    """What a call gives that is made while the broker is busy, and is not over before the broker is free again."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    with busy_broker(url):
        thread.start()
        thread.join(BUSY_S)
        assert thread.is_alive(), f"over while the broker was busy: {found}"
    thread.join(10)
    assert found, "it raised"
    return found[0]


def two_at_once(client: Redis, transaction: bool) -> Any:
    return client.pipeline(transaction=transaction).set("k", "v").get("k").execute()


@pytest.mark.parametrize(
    ("call", "gives"),
    [
        (lambda client: client.set("k", "v"), True),
        (lambda client: two_at_once(client, True), [True, b"v"]),
        (lambda client: two_at_once(client, False), [True, b"v"]),
        (lambda client: Channel(client).exchange([["PING"]]), [b"PONG"]),
        (lambda client: Channel(client).fetch([["PING"]], [None]), [b"PONG"]),
    ],
    ids=["command", "transaction", "pipeline", "exchange", "fetch"],
)
@pytest.mark.slow
def test_a_call_waits_until_the_broker_is_free(url: str, call: Callable[[Redis], Any], gives: Any) -> None:
    with closing(connect(url)) as client:
        assert done_while_busy(url, lambda: call(client)) == gives


def test_who_waits_for_no_outage_hears_at_once(url: str) -> None:
    with closing(connect(url, retries=0)) as client, busy_broker(url):
        with pytest.raises(RedisConnectionError, match="BUSY"):
            client.set("k", "v")
        with pytest.raises(RedisConnectionError, match="BUSY"):
            Channel(client).exchange([["PING"]])
