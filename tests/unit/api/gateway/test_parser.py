"""The parser of machines' commands: whatever is sent, and however it is cut, in bounded memory."""

import contextlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.gateway.commands.parser import COMMAND_BYTES, HELD_BYTES, MOST_ARGUMENTS, Commands, Head, NotACommand
from tests.support import sample

CHUNK = 1 << 18
CASES = sample.of(range(100_000), 100_000 if sample.WHOLE else 1_500, "frames")


def framed(*arguments: bytes) -> bytes:
    return b"*%d\r\n" % len(arguments) + b"".join(b"$%d\r\n%b\r\n" % (len(each), each) for each in arguments)


def large(arguments: list[bytes]) -> bool:
    return arguments[0] == b"LARGE" and len(arguments) == 2


def run(pieces: list[bytes], skipped: bytes = b"NO") -> tuple[bytes, list[Head], int]:
    """What passes, what was decided on, and the most bytes held; a command with the name `skipped` does not pass."""
    commands, out, heads, most = Commands(large), b"", [], 0
    for piece in pieces:
        commands.push(piece)
        out += b"".join(commands.rest())
        while (head := commands.head()) is not None:
            heads.append(head)
            if head.arguments[:1] == (skipped,) or (not head.is_complete and head.arguments[:1] != (b"LARGE",)):
                commands.skip()
            else:
                out += b"".join(commands.accept())
        most = max(most, commands.held_bytes)
    return out, heads, most


SOME = (
    framed(b"GET", b"key"),
    framed(b"LARGE", b"key", b"0", b"x" * 50, b"1", b""),
    framed(b"NO", b"key", b"\r\n*1\r\n$4\r\nPING\r\n"),
    framed(b"PING"),
    framed(b""),
    framed(b"LARGE", b"key"),
)


def test_commands_cut_at_every_byte_pass_unchanged() -> None:
    sent = b"".join(SOME)
    right = sent.replace(SOME[2], b"")
    assert run([sent])[0] == right
    for at in range(1, len(sent)):
        assert run([sent[:at], sent[at:]])[0] == right
    out, heads, _ = run([sent[at : at + 1] for at in range(len(sent))])
    assert out == right
    assert [head.arguments[0] for head in heads] == [b"GET", b"LARGE", b"NO", b"PING", b"", b"LARGE"]
    assert not heads[1].is_complete and heads[1].count == 6


COMMAND = st.lists(st.binary(max_size=40), min_size=1, max_size=6)
NAMED = st.sampled_from([b"GET", b"NO", b"LARGE"])


@given(st.lists(st.tuples(NAMED, COMMAND), max_size=8), st.lists(st.integers(1, 60), min_size=1, max_size=50))
def test_any_commands_in_any_pieces_pass_or_are_skipped_whole(
    some: list[tuple[bytes, list[bytes]]], sizes: list[int]
) -> None:
    sent = b"".join(framed(name, *arguments) for name, arguments in some)
    pieces, at = [], 0
    while at < len(sent):
        pieces.append(sent[at : (at := at + sizes[len(pieces) % len(sizes)])])
    out, heads, _ = run(pieces)
    assert out == b"".join(framed(name, *arguments) for name, arguments in some if name != b"NO")
    assert [head.arguments[0] for head in heads] == [name for name, _ in some]


@given(st.lists(st.binary(max_size=300), max_size=8))
def test_garbage_is_no_command_and_nothing_else(pieces: list[bytes]) -> None:
    with contextlib.suppress(NotACommand):
        run(pieces)


@pytest.mark.parametrize(
    "wrong",
    [
        b"PING\r\n",
        b"\r\n",
        b"+OK\r\n",
        b"*0\r\n",
        b"*-1\r\n",
        b"*01\r\n",
        b"*+1\r\n",
        b"* 1\r\n",
        b"*1\n$4\nPING\n*1\n$4\nPING\n",
        b"*%d\r\n" % (MOST_ARGUMENTS + 1),
        b"*1\r\n*1\r\n",
        b"*1\r\n$-1\r\n",
        b"*1\r\n$99999999999\r\n",
        b"*1\r\n$%d\r\n" % (COMMAND_BYTES + 1),
        b"*1\r\n$4\r\nPINGxx",
        b"*1111111111111111111",
    ],
)
def test_what_is_no_command_is_refused_at_once(wrong: bytes) -> None:
    with pytest.raises(NotACommand):
        run([wrong])


def test_a_large_command_passes_in_little_memory() -> None:
    blob = random.Random(1).randbytes(10_000_000)
    sent = framed(b"LARGE", b"key", b"0", blob, b"1", blob)
    out, _, most = run([sent[at : at + CHUNK] for at in range(0, len(sent), CHUNK)])
    assert out == sent and most <= CHUNK


def test_the_end_of_a_command_is_replaced_however_it_is_cut() -> None:
    sent, right = (framed(b"LARGE", b"key", b"x" * 50, *end) for end in ((b"PX", b"1" * 12), (b"EX", b"60")))
    for size in (1, 7, 1000):
        commands, out = Commands(large), b""
        for at in range(0, 3 * len(sent), size):
            commands.push((sent * 3)[at : at + size])
            out += b"".join(commands.rest())
            while commands.head() is not None:
                out += b"".join(commands.accept((b"EX", b"60")))
        assert out == right * 3


def test_what_is_announced_and_has_not_come_takes_no_memory() -> None:
    assert run([b"*1\r\n$900000\r\n"])[2] < 100


def test_a_call_with_many_keys_is_decided_on_as_a_whole() -> None:
    call = framed(b"EVALSHA", *[b"x" * 90] * 9000)
    assert run([call])[1][0].is_complete and not run([call.replace(b"EVALSHA", b"EVALSHB")])[1][0].is_complete


def test_a_long_command_that_cannot_be_decided_on_is_skipped_in_little_memory() -> None:
    for arguments in ([b"GET", bytes(10_000_000)], [b"x"] * MOST_ARGUMENTS, [b"GET", *[bytes(60_000)] * 100]):
        sent = framed(*arguments) + framed(b"PING")
        out, heads, most = run([sent[at : at + CHUNK] for at in range(0, len(sent), CHUNK)])
        assert out == framed(b"PING") and not heads[0].is_complete
        assert most <= HELD_BYTES + CHUNK


@pytest.mark.parametrize("share", range(10))
def test_frames_that_are_cut_and_changed_never_crash_the_parser(share: int) -> None:
    for seed in CASES[share::10]:
        draw = random.Random(seed)
        sent = bytearray(b"".join(draw.choice(SOME) for _ in range(draw.randrange(1, 5))))
        for _ in range(draw.randrange(3)):
            at = draw.randrange(len(sent))
            sent[at : at + draw.randrange(3)] = draw.choice((b"", b"\r\n", b"$", b"*", b"9", draw.randbytes(2)))
        try:
            out, heads, most = run([bytes(sent[at : at + 7]) for at in range(0, len(sent), 7)])
        except NotACommand:
            continue
        assert len(out) <= len(sent) and most <= 65 * len(sent)
        assert all(head.arguments for head in heads)
