"""Commands as pieces for a socket."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import DataError

from computeshare.transport.commands import AHEAD, Outgoing


def sent(outgoing: Outgoing, step: int) -> bytes:
    """What goes out in steps of so many bytes."""
    found = b""
    while outgoing.ready:
        pieces = outgoing.head(step)
        piece = b"".join(pieces)
        assert 0 < len(piece) <= step
        outgoing.sent(len(piece))
        found += piece
    return found


def test_arguments_are_framed_by_their_kind() -> None:
    command = ["SET", b"a\r\n", 12, -1.5, "ü", memoryview(b"bc"), np.arange(2, dtype=np.int16), np.float64(0.1), b""]
    text = b"*9\r\n$3\r\nSET\r\n$3\r\na\r\n\r\n$2\r\n12\r\n$4\r\n-1.5\r\n$2\r\n\xc3\xbc\r\n$2\r\nbc\r\n"
    assert sent(Outgoing([command], [0]), 1000) == text + b"$4\r\n\0\0\1\0\r\n$3\r\n0.1\r\n$0\r\n\r\n"


@pytest.mark.parametrize("argument", [None, True, object(), [1], np.int64(5), np.zeros((4, 4))[:, :2]])
def test_an_argument_that_would_go_out_as_something_else_is_refused(argument: Any) -> None:
    with pytest.raises(DataError):
        Outgoing([["SET", "key", argument]], [0])


def test_a_large_value_is_neither_copied_nor_joined() -> None:
    value = np.zeros(1_000_000, np.float32)
    pieces = Outgoing([["SET", "key", value], ["GET", "key"]], [0, 0]).head(10_000_000)
    assert sum(piece.obj is value for piece in pieces) == 1 and len(pieces) == 4
    assert len(pieces[1]) == 4_000_000


@given(st.lists(st.binary(max_size=9000), max_size=80), st.integers(1, 20_000))
def test_pieces_cut_anywhere_are_the_same_bytes(values: list[bytes], step: int) -> None:
    expected = b"".join(b"*2\r\n$1\r\nX\r\n$%d\r\n%b\r\n" % (len(value), value) for value in values)
    outgoing = Outgoing([["X", value] for value in values], [0] * len(values))
    assert outgoing.ready == len(expected)
    assert sent(outgoing, step) == expected and not outgoing.left


def test_commands_with_large_replies_wait_for_those_before_them_and_hold_up_what_follows() -> None:
    outgoing = Outgoing([["1"], ["2"], ["3"], ["4"], ["5"]], [0, AHEAD // 2, 0, AHEAD, 10])
    assert sent(outgoing, 99) == b"*1\r\n$1\r\n1\r\n*1\r\n$1\r\n2\r\n*1\r\n$1\r\n3\r\n" and outgoing.left
    outgoing.answered(1)
    assert not outgoing.ready
    outgoing.answered(1)
    assert sent(outgoing, 99) == b"*1\r\n$1\r\n4\r\n" and outgoing.left
    outgoing.answered(2)
    assert sent(outgoing, 99) == b"*1\r\n$1\r\n5\r\n" and not outgoing.left


def test_one_reply_larger_than_what_is_asked_for_at_a_time_is_asked_for_alone() -> None:
    outgoing = Outgoing([["1"], ["2"]], [3 * AHEAD, 3 * AHEAD])
    assert sent(outgoing, 99) == b"*1\r\n$1\r\n1\r\n"
    outgoing.answered(1)
    assert sent(outgoing, 99) == b"*1\r\n$1\r\n2\r\n"
