"""The weights of peers that have no unit in a round: their mean, their buffers and how far apart they are."""

from typing import Any

import numpy as np
import pytest

from computeshare.codecs.messages import encode_update
from computeshare.codecs.registry import EXACT
from computeshare.errors import LostClaim
from computeshare.gossip.peers_mean import PeersMean
from computeshare.protocol.refusal import Received
from computeshare.protocol.round_store import RoundState
from computeshare.tensors.layout import Layout, Tensor, Weights
from computeshare.types import Blob, Message, Token, Vector

SIZE = 6
LAYOUT = Layout((Tensor("w", (SIZE,), "parameter", 0, SIZE), Tensor("mean", (2,), "buffer", 0, 2)))
ZERO, ONE, TWO = (Token(1, version, str(version) * 16) for version in range(3))
RNG = np.random.default_rng(3)


class Board:
    """A broker that holds published weights, of which a difference from version `base` is all `value`."""

    job_id = "job"

    def __init__(self, **others: tuple[Token, Vector, float]) -> None:
        self.others = others

    def peers(self) -> list[str]:
        return [*self.others]

    def newest_of(self, worker: str, parts: int, into: Blob) -> tuple[bytes, Message | None]:
        if worker not in self.others:
            return b"", None
        base, difference, buffers = self.others[worker]
        message = encode_update(EXACT, difference, np.full(2, buffers, np.float32), LAYOUT, 0)
        return f"{base}|3|0.5|9".encode(), message


def mean_of(board: Any, recent: int = 3) -> PeersMean:
    def published(token: Token) -> Weights:
        if token != ONE:
            raise LostClaim("gone")
        return Weights(np.full(SIZE, 1, np.float32), np.zeros(2, np.float32), np.zeros(0, np.int64))

    return PeersMean(board, LAYOUT, EXACT, recent, published)


def state(base: Token | None, token: Token) -> RoundState:
    return RoundState("running", token, base, 0, 2, needed=2)


def part(unit: int, worker: str, base: Token, at: float) -> Received:
    return Received(unit, worker, "session", "nonce", str(base), 0.5, 10, at, b"")


def test_the_absent_are_averaged_whatever_their_reference() -> None:
    some = [RNG.normal(size=SIZE).astype(np.float32) for _ in range(3)]
    board = Board(
        here=(TWO, some[0], 9), a=(TWO, some[0], 1), b=(ONE, some[1], 3), c=(TWO, some[2], 8), old=(ZERO, some[0], 0)
    )
    at = np.full(SIZE, 5, np.float32)
    found = mean_of(board).newest(state(ONE, TWO), {4: part(4, "here", TWO, 1)}, at)
    moved = np.array([some[0], some[1] + 4, some[2]], dtype=float)
    assert found.absent.count == 3 and found.counts == [1, 3]
    assert found.absent.update == pytest.approx(moved.mean(axis=0), abs=1e-5)
    assert found.absent.buffers == pytest.approx(np.full(2, 4.0))
    assert found.absent.square == pytest.approx(np.square(moved - moved.mean(axis=0)).sum(), rel=1e-4)
    assert [one.tolist() for one in found.absent.after([at], slice(0, 2))] == [
        at.tolist(),
        found.absent.update[:2].tolist(),
    ]


def test_of_a_peer_with_several_units_the_newest_counts() -> None:
    parts = {1: part(1, "a", TWO, 5.0), 2: part(2, "a", ONE, 3.0), 3: part(3, "b", ONE, 4.0)}
    found = mean_of(Board()).newest(state(ONE, TWO), parts, np.full(SIZE, 5, np.float32))
    assert {*found.parts} == {1, 3} and found.offsets[3].tolist() == [4] * SIZE and found.counts == [1, 1]


def test_without_a_known_reference_nothing_counts() -> None:
    parts = {1: part(1, "a", ZERO, 5.0)}
    assert mean_of(Board()).newest(state(ZERO, ONE), parts, np.zeros(SIZE, np.float32)).counts == []
    alone = mean_of(Board(), recent=1)
    assert alone.newest(state(ONE, TWO), {1: part(1, "a", ONE, 5.0)}, np.zeros(SIZE, np.float32)).counts == []
