"""A control plane of another protocol than the one before gives the rounds up that lie in the broker."""

import json

from redis import Redis

from computeshare.protocol import handshake, keys
from computeshare.protocol.reducer_session import ReducerSession
from tests.support.rounds import ZERO


def speak(redis: Redis, protocol: int) -> None:
    redis.set(keys.RELEASE, json.dumps({"version": "0.0.9", "protocol": protocol}))


def test_rounds_of_another_protocol_are_given_up_with_their_messages(redis: Redis, reducer: ReducerSession) -> None:
    k = reducer.keys
    redis.hset(k.banned(), "liar", "too many")
    speak(redis, handshake.PROTOCOL - 1)
    handshake.publish(redis)
    assert handshake.published(redis) == handshake.OURS
    assert not redis.exists(k.round(), k.weights(str(ZERO)), k.state(str(ZERO)), k.versions())
    assert redis.exists(k.spec(), k.events(), k.fence(), k.banned()) == 4


def test_rounds_of_ones_own_protocol_go_on(redis: Redis, reducer: ReducerSession) -> None:
    speak(redis, handshake.PROTOCOL)
    handshake.publish(redis)
    assert reducer.read() is not None and redis.exists(reducer.keys.weights(str(ZERO)))
