"""Messages that are staged before the script that uses them."""

import secrets
from typing import Any

import pytest
from redis import Redis

from computeshare.protocol.channel import Channel


def test_many_messages_are_staged_in_a_number_of_commands_in_proportion(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    exchange = Channel.exchange

    def counted(channel: Channel, commands: Any, *rest: Any, **others: Any) -> Any:
        sent.extend(commands)
        return exchange(channel, commands, *rest, **others)

    monkeypatch.setattr(Channel, "exchange", counted)
    keys = [f"cs:{secrets.token_hex(4)}" for _ in range(200)]
    Channel(redis).stage({key: [b"part"] for key in keys}, 60)
    assert len(sent) <= 4 * len(keys)
    assert all(redis.hget(key, "0") == b"part" and 0 < int(redis.ttl(key)) <= 60 for key in keys)  # type: ignore[arg-type]
