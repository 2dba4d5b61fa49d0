"""Peers that exchange over a real broker, in step: their mean takes the outer steps of strategy `local`."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from redis import Redis

from computeshare.codecs.messages import encode_update
from computeshare.codecs.registry import EXACT
from computeshare.gossip.exchange import Partners
from computeshare.gossip.peer_replica import PeerReplica
from computeshare.gossip.peer_weights import GroupWeights
from computeshare.strategies.gossip import GossipStrategy
from computeshare.tensors.layout import Layout, Tensor, Weights
from computeshare.training.work_units import Compilation, Take, Update
from computeshare.types import Vector

SIZE, TOKEN = 5, "1.0.aaaaaaaaaaaaaaaa"
LAYOUT = Layout((Tensor("w", (SIZE,), "parameter", 0, SIZE),))
NONE = np.zeros(0, np.float32)


class Valley:
    """A replica whose unit leads a fifth of the way to an optimum of its own."""

    kept = room = None
    compilation = Compilation()

    def __init__(self, optimum: float) -> None:
        self._optimum, self._at = np.float32(optimum), np.zeros(SIZE, np.float32)

    def load(self, weights: Weights) -> None:
        self._at = weights.parameters

    def prefetch(self, micro_batches: Iterable[int]) -> None: ...

    def compute(self, unit: int, goes_on: Callable[[], bool] = lambda: True, take: Take | None = None) -> Update:
        return Update((self._at - self._optimum) / np.float32(5), NONE, 1.0)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("outer", [{"outer_lr": 1.0, "outer_momentum": 0.0}, {"outer_lr": 0.7, "outer_momentum": 0.8}])
def test_the_mean_of_peers_in_step_takes_the_outer_steps_of_local(
    redis: Redis, job_id: str, count: int, outer: dict[str, Any]
) -> None:
    torch = pytest.importorskip("torch")
    strategy = GossipStrategy.model_validate({"matching": "pairs", "timeout_ms": 20_000, **outer})
    boards = [GroupWeights(redis, job_id, f"peer{number}") for number in range(count)]
    start = Weights(np.zeros(SIZE, np.float32), NONE, np.zeros(0, np.int64))
    peers = [
        PeerReplica(
            Valley(number), strategy, board, Partners(f"peer{number}", 0, "pairs"), EXACT, LAYOUT, lambda: TOKEN
        )
        for number, board in enumerate(boards)
    ]
    for peer in peers:
        peer.load(start)
    mean = torch.nn.Parameter(torch.zeros(SIZE))
    local = torch.optim.SGD(
        [mean], lr=outer["outer_lr"], momentum=outer["outer_momentum"], nesterov=outer["outer_momentum"] > 0
    )
    positions: list[Vector] = []
    for unit in range(8):
        differences = [peer.compute(unit).vector for peer in peers]
        for peer in peers:  # who lists the peers meanwhile would find some of them, and would not look again at once
            peer.exchange.answer()
        for board, difference in zip(boards, differences, strict=True):
            board.publish(TOKEN, unit + 1, 1.0, encode_update(EXACT, difference, NONE, LAYOUT, 0))
        for peer in peers:  # all ask once more, now that all have published
            peer.exchange.ask(unit + 1)
        mean.grad = (mean.detach() - (count - 1) / 2) / 5
        local.step()
        positions = [-difference for difference in differences]
        assert np.mean(positions, axis=0) == pytest.approx(mean.detach().numpy(), rel=1e-4)
    assert all(peer.report().met for peer in peers)
    assert np.std(positions, axis=0).max() < 1.0, "apart, but no longer as far as their optima"
