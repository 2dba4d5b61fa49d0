"""A body has to come in time, in whatever pieces; waiting for a client to go takes as long as it takes."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import HTTPException
from starlette.types import Message, Receive, Scope, Send

from api.http.body_deadline import BodyDeadline
from tests.support.coroutines import asynchronously

GRACE_S = 0.05


def served(*messages: Message | float) -> list[Message]:
    """What an application receives, up to the end of the body and one message more; a number is a pause in seconds."""
    found: list[Message] = []
    coming = iter(messages)

    async def receive() -> Message:
        for one in coming:
            if isinstance(one, dict):
                return one
            await asyncio.sleep(float(one))  # type: ignore[arg-type]
        raise AssertionError("there is nothing more")

    async def app(_scope: Scope, receive: Receive, _send: Send) -> None:
        for _ in [one for one in messages if isinstance(one, dict)]:
            found.append(await receive())

    async def send(_message: Message) -> None:
        raise AssertionError("nothing is sent here")

    asynchronously(BodyDeadline(app, GRACE_S)({"type": "http"}, receive, send))
    return found


def part(size: int, more: bool) -> dict[str, Any]:
    return {"type": "http.request", "body": b"x" * size, "more_body": more}


def test_a_body_that_comes_at_once_is_passed_on() -> None:
    assert len(served(part(10, True), part(10, False), {"type": "http.disconnect"})) == 3


@pytest.mark.parametrize("before", [[], [part(1, True)], [part(1, True), part(1, True)]])
def test_a_body_that_does_not_come_is_given_up(before: list[Message]) -> None:
    with pytest.raises(HTTPException) as refusal:
        served(*before, 60.0, part(1, False))
    assert (refusal.value.status_code, refusal.value.headers) == (408, {"connection": "close"})


def test_what_has_come_earns_time_for_the_rest() -> None:
    assert len(served(part(1_000_000, True), 4 * GRACE_S, part(1, False))) == 2


def test_after_the_body_a_client_may_stay_as_long_as_it_likes() -> None:
    assert served(part(1, False), 4 * GRACE_S, {"type": "http.disconnect"})[-1]["type"] == "http.disconnect"


def test_other_connections_than_requests_are_none_of_its_business() -> None:
    seen: list[str] = []

    async def app(scope: Scope, _receive: Receive, _send: Send) -> None:
        seen.append(scope["type"])

    unused: Callable[..., Any] = None  # type: ignore[assignment]
    asynchronously(BodyDeadline(app)({"type": "lifespan"}, unused, unused))
    assert seen == ["lifespan"]
