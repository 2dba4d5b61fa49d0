"""How much a machine may ask for before it takes the replies."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from api.gateway.commands.filter import CommandFilter, TooMuchUnfinished
from api.gateway.commands.parser import COMMAND_BYTES
from api.gateway.commands.replies import MOST_COMMANDS, MOST_OF_ONE, MOST_PARTS, AwaitedReplies, ReplyStream, Unread
from computeshare.protocol.keys import JobKeys
from tests.support.coroutines import asynchronously
from tests.unit.api.gateway.test_parser import framed

WEIGHTS = JobKeys("mine").weights("1.0.0123456789abcdef").encode()
PROBE = JobKeys("mine").probe("12345678work").encode()
REPLIES = (
    b"+OK\r\n",
    b"-ERR no\r\n",
    b":1\r\n",
    b"$-1\r\n",
    b"$0\r\n\r\n",
    b"$6\r\n*1\r\n:1\r\n",
    b"*-1\r\n",
    b"*0\r\n",
    b"*2\r\n*2\r\n:1\r\n$1\r\nx\r\n*0\r\n",
    b"%1\r\n+a\r\n*1\r\n$-1\r\n",
    b"_\r\n",
    b"=5\r\ntxt:x\r\n",
    b"*3\r\n$9\r\nsubscribe\r\n$1\r\nx\r\n:1\r\n",
)


class Everything:
    def known(self, *_: object) -> bool:
        return True

    def refusal(self, *_: object) -> None:
        return None

    def __getattr__(self, _: str) -> Any:
        return lambda *_: True


def filters(count: int) -> list[CommandFilter]:
    """Filters of a machine's connections, which refuse nothing for want of a seat."""
    unread, unfinished = Unread(), Counter[str]()
    anything: Any = Everything()
    return [
        CommandFilter("12345678", anything, lambda _: None, AwaitedReplies(unread), unfinished, anything, anything)
        for _ in range(count)
    ]


async def passes(commands: CommandFilter, data: bytes) -> tuple[bytes, bool]:
    """What passes of some bytes, and whether all was decided on, when no reply is taken."""
    out = b""
    try:
        async with asyncio.timeout(0.05):
            async for pieces in commands.passed(data):
                out += b"".join(pieces)
    except TimeoutError:
        return out, False
    return out, True


def test_replies_are_counted_however_they_are_cut() -> None:
    messages = b"*3\r\n$7\r\nmessage\r\n$1\r\nx\r\n$1\r\ny\r\n>3\r\n$7\r\nmessage\r\n$1\r\nx\r\n$1\r\ny\r\n"
    sent = messages.join(REPLIES) + b">2\r\n$9\r\nsubscribe\r\n:1\r\n"
    for size in (1, 2, 3, 7, len(sent)):
        stream = ReplyStream()
        found = [one for at in range(0, len(sent), size) for one in stream.ended(sent[at : at + size])]
        assert found == [False] * len(REPLIES) + [True]


def test_a_machine_asks_for_little_until_it_takes_the_replies() -> None:
    async def check() -> None:
        one, other = filters(2)
        get = framed(b"HGET", WEIGHTS, b"0")
        out, done = await passes(one, get * 1000)
        assert not done and out == get * MOST_PARTS
        assert await passes(other, get) == (b"", False), "connections of a machine share what it may ask for"
        (third,) = filters(1)
        assert await passes(third, get) == (get, True), "other machines are not held up"
        one.replies.taken(b"$1\r\nx\r\n" * 5)
        assert other.replies.has_room(5) and not other.replies.has_room(6)
        one.close()
        assert other.replies.has_room(MOST_PARTS)

    asynchronously(check())


def test_a_whole_model_passes_and_small_commands_are_not_held_up() -> None:
    async def check() -> None:
        (one,) = filters(1)
        whole = framed(b"HMGET", WEIGHTS, *(b"%d" % part for part in range(1000)))
        out, done = await passes(one, whole * 3)
        assert out == whole * (MOST_PARTS // MOST_OF_ONE) and not done
        (two,) = filters(1)
        ping = framed(b"PING")
        assert len((await passes(two, ping * (MOST_COMMANDS + 5)))[0]) == len(ping) * MOST_COMMANDS

    asynchronously(check())


def test_a_transaction_asks_for_no_more_than_a_command() -> None:
    async def check() -> None:
        (one,) = filters(1)
        get = framed(b"HGET", WEIGHTS, b"0")
        out, _ = await passes(one, framed(b"MULTI") + get * (MOST_OF_ONE + 1))
        assert out.count(get) == MOST_OF_ONE and b"asks for too much" in out

    asynchronously(check())


def test_messages_on_a_channel_stand_for_no_reply() -> None:
    (one,) = filters(1)
    one.replies.sent(MOST_OF_ONE)
    one.replies.sent(MOST_OF_ONE)
    one.replies.taken(b">3\r\n$9\r\nsubscribe\r\n$1\r\nx\r\n:1\r\n*3\r\n$7\r\nmessage\r\n$1\r\nx\r\n$1\r\ny\r\n")
    assert not one.replies.has_room(1)


def test_unfinished_commands_of_a_machine_are_bounded_in_all() -> None:
    async def check() -> None:
        size = COMMAND_BYTES // 2
        begin = b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\nxxxx" % (len(PROBE), PROBE, size - 100)
        one, two, three = filters(3)
        await passes(one, begin)
        await passes(two, begin)
        with pytest.raises(TooMuchUnfinished):
            await passes(three, begin)
        three.close()
        two.close()
        (fresh,) = filters(1)
        assert (await passes(fresh, begin))[1]

    asynchronously(check())
