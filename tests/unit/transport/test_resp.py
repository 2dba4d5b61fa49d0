"""Replies of every kind, in pieces of every size."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import (
    BusyLoadingError,
    InvalidResponse,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)

from computeshare.errors import CodecError
from computeshare.transport.resp import ReplyParser

EVERY_KIND = (
    b"+OK\r\n:-12\r\n$3\r\na\r\n\r\n$0\r\n\r\n$-1\r\n*-1\r\n*0\r\n*3\r\n:1\r\n*2\r\n$1\r\nx\r\n_\r\n+y\r\n"
    b",1.5\r\n,inf\r\n#t\r\n#f\r\n(12345678901234567890\r\n=7\r\ntxt:abc\r\n%2\r\n+k\r\n:1\r\n$1\r\nl\r\n*1\r\n:2\r\n"
    b"~2\r\n:1\r\n:2\r\n%0\r\n"
)
VALUES = [b"OK", -12, b"a\r\n", b"", None, None, [], [1, [b"x", None], b"y"]]
VALUES += [1.5, float("inf"), True, False, 12345678901234567890, b"abc", {b"k": 1, b"l": [2]}, [1, 2], {}]


def fed(replies: ReplyParser, data: bytes, sizes: Iterable[int]) -> ReplyParser:
    """Hand over `data` in pieces of these sizes, the last of which goes on."""
    at, size = 0, 1
    steps = iter(sizes)
    while at < len(data):
        size = next(steps, size)
        space = replies.space()
        count = min(size, len(space), len(data) - at)
        space[:count] = data[at : at + count]
        replies.received(count)
        at += count
    return replies


def read(data: bytes, into: Sequence[memoryview | None], sizes: Iterable[int] = (1 << 20,)) -> ReplyParser:
    replies = ReplyParser()
    replies.expect(into)
    return fed(replies, data, sizes)


@pytest.mark.parametrize("size", [*range(1, 30), 100, 1000])
def test_every_kind_of_reply_is_read_in_pieces_of_any_size(size: int) -> None:
    replies = read(EVERY_KIND, [None] * len(VALUES), [size])
    assert replies.missing == 0 and replies.take(len(VALUES)) == (VALUES, None) and replies.waiting == b""


PATTERN = bytes(range(251)) * 600
TREES = st.recursive(
    st.none() | st.integers() | st.binary(max_size=40) | st.integers(65_000, 140_000).map(lambda size: PATTERN[:size]),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)


def encoded(value: Any) -> bytes:
    match value:
        case None:
            return b"$-1\r\n"
        case int():
            return b":%d\r\n" % value
        case bytes():
            return b"$%d\r\n%b\r\n" % (len(value), value)
    return b"*%d\r\n" % len(value) + b"".join(map(encoded, value))


@given(st.lists(TREES, min_size=1, max_size=4), st.lists(st.integers(1, 150_000), min_size=1, max_size=20), st.data())
def test_nested_replies_are_read_however_they_are_cut(values: list[Any], sizes: list[int], data: st.DataObject) -> None:
    buffers = [memoryview(bytearray(1_200_000)) if data.draw(st.booleans()) else None for _ in values]
    replies = read(b"".join(map(encoded, values)), buffers, [*sizes, max(1000, *sizes)])
    assert replies.missing == 0 and replies.take(len(values)) == (values, None)


def test_replies_that_came_together_are_kept_for_those_who_ask_next() -> None:
    replies = read(b"+1\r\n+2\r\n$3\r\nabc\r\n", [None])
    assert replies.missing == 0 and replies.take(1) == ([b"1"], None) and replies.waiting == b"+2\r\n$3\r\nabc\r\n"
    replies.expect([None, None])
    assert replies.missing == 0 and replies.take(2) == ([b"2", b"abc"], None)


@pytest.mark.parametrize("size", [1, 6, 1000])
def test_the_first_replies_may_be_taken_before_the_others_are_there(size: int) -> None:
    data, kept = b"-ERR a\r\n+1\r\n*2\r\n$3\r\nabc\r\n-ERR b\r\n", bytearray(3)
    replies = read(data[:-9], [None, None, memoryview(kept)], [size])
    (first, one), error = replies.take(2)
    assert (str(first), one, first) == ("a", b"1", error)
    assert replies.missing == replies.expected == 1
    [[text, second]], error = fed(replies, data[-9:], [size]).take(1)
    assert (text, str(second), second) == (b"abc", "b", error)
    assert replies.missing == replies.expected == 0 and text.obj is kept


@pytest.mark.parametrize("size", [7, 5000, 1 << 20])
def test_strings_of_a_reply_lie_one_after_another_in_the_buffer_given_for_it(size: int) -> None:
    values = [bytes([n]) * length for n, length in enumerate((100_000, 3, 0, 70_000))]
    kept = bytearray(170_003)
    replies = read(encoded([*values, 7, None]) + b"$2\r\nno\r\n", [memoryview(kept), None], [size])
    (found, other), _ = replies.take(2)
    assert found == [*values, 7, None] and kept == b"".join(values)
    assert all(view.obj is kept for view in found[:4])
    assert type(other) is bytes and other == b"no"


@pytest.mark.parametrize("size", [13, 1000, 1 << 20])
def test_a_value_that_does_not_fit_is_an_error_in_its_place_and_leaves_the_buffer_alone(size: int) -> None:
    kept = bytearray(10)
    data = b"*3\r\n$4\r\nabcd\r\n$200000\r\n" + b"x" * 200_000 + b"\r\n$6\r\nefghij\r\n+next\r\n"
    replies = read(data, [memoryview(kept), None], [size])
    ((first, error, last), following), noted = replies.take(2)
    assert (first, last, following, kept) == (b"abcd", b"efghij", b"next", b"abcdefghij")
    assert isinstance(error, CodecError) and "200000 bytes" in str(error) and noted is error


def test_errors_are_exceptions_of_their_kind_wherever_they_stand() -> None:
    lines = b"-ERR a\r\n-NOSCRIPT b\r\n-OOM c\r\n-READONLY d\r\n-NOPERM e\r\n!9\r\nERR f\r\nzz\r\n"
    replies = read(lines + b"*2\r\n+fine\r\n-WRONGTYPE g\r\n", [None] * 7)
    (*errors, (fine, nested)), noted = replies.take(7)
    kinds = [ResponseError, NoScriptError, OutOfMemoryError, ReadOnlyError, NoPermissionError, ResponseError]
    assert [type(error) for error in errors] == kinds and str(errors[5]) == "f\r\nzz"
    assert fine == b"fine" and type(nested) is ResponseError and str(nested) == "WRONGTYPE g"
    assert noted is errors[0]


def test_a_broker_busy_with_a_script_is_one_that_is_away_but_a_group_that_exists_is_an_error() -> None:
    (busy, group), noted = read(b"-BUSY Valkey is busy\r\n-BUSYGROUP exists\r\n", [None] * 2).take(2)
    assert type(busy) is BusyLoadingError and noted is busy
    assert type(group) is ResponseError


@pytest.mark.parametrize("size", [1, 1000])
def test_pushes_and_attributes_answer_nothing_and_take_no_room(size: int) -> None:
    push = b">2\r\n$10\r\ninvalidate\r\n*1\r\n$3\r\nkey\r\n"
    data = push + b"*2\r\n|1\r\n+ttl\r\n:5\r\n$1\r\na\r\n:2\r\n" + push + b">0\r\n$1\r\nb\r\n"
    kept = bytearray(2)
    assert read(data, [memoryview(kept)[:1], memoryview(kept)[1:]], [size]).take(2)[0] == [[b"a", 2], b"b"]
    assert kept == b"ab"


@pytest.mark.parametrize(
    "data",
    [
        *(b"?\r\n", b"\r\n", b":x\r\n", b"$-2\r\n", b"$3000000000\r\n", b"*-3\r\n", b"*x\r\n", b",x\r\n", b"#x\r\n"),
        *(b"$2\r\nabcd", b"+" + b"x" * 70_000, b"*1\r\n" * 70, b"%1\r\n*1\r\n:1\r\n:2\r\n"),
    ],
)
def test_what_is_no_reply_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidResponse):
        read(data, [None])


@given(st.binary(max_size=300), st.integers(1, 50))
def test_no_bytes_do_worse_than_being_refused(data: bytes, size: int) -> None:
    replies = ReplyParser()
    replies.expect([None, memoryview(bytearray(10))])
    try:
        fed(replies, data, [size])
    except InvalidResponse:
        return
    assert 0 <= replies.missing <= 2
