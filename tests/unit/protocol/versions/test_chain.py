"""Chains of versions: which way leads to a version, and when another snapshot is due."""

import pytest

from computeshare.protocol.versions.chain import LONGEST, Chain, Route, route
from computeshare.types import Token

TOKENS = [Token(1, version, f"{version:016x}") for version in range(100)]


@pytest.mark.parametrize(
    ("loaded", "token", "expected"),
    [
        ("d", "e", Route(None, ("e",))),
        ("a", "e", Route(None, ("b", "c", "d", "e"))),
        ("e", "e", Route(None, ())),
        ("", "e", Route("c", ("d", "e"))),
        ("older", "c", Route("c", ())),
        ("", "b", Route("a", ("b",))),  # the newest snapshot comes after it
        ("e", "b", Route("a", ("b",))),  # there is no way back
        ("", "gone", None),
    ],
)
def test_the_way_to_a_version(loaded: str, token: str, expected: Route | None) -> None:
    assert route([*"abcde"], "c", loaded, token) == expected


def test_another_snapshot_is_due_once_the_differences_are_as_large() -> None:
    chain = Chain([TOKENS[0]], TOKENS[0], whole_bytes=100)
    for version in (1, 2, 3):
        assert not chain.wants_snapshot
        chain.add(TOKENS[version], 34)
    assert chain.wants_snapshot and chain.outdated == []
    chain.renew(TOKENS[3], 100)
    assert not chain.wants_snapshot and chain.tokens == TOKENS[:4]
    chain.add(TOKENS[4], 100)
    assert chain.wants_snapshot and chain.outdated == TOKENS[:3]
    chain.renew(TOKENS[4], 100)
    assert chain.tokens == TOKENS[3:5] and chain.outdated == TOKENS[3:4]


def test_another_snapshot_is_due_after_many_small_differences() -> None:
    chain = Chain([TOKENS[0]], TOKENS[0], whole_bytes=10**9)
    for version in range(1, LONGEST + 1):
        assert not chain.wants_snapshot
        chain.add(TOKENS[version], 1)
    assert chain.wants_snapshot
