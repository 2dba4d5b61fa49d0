"""How the micro-batches of a round of local SGD are shared out among replicas that are not equally fast. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Walked:
    """What one replica of a round was: by whom, how many micro-batches, leased and done when (milliseconds)."""

    worker: str
    micro_batches: int
    leased_ms: float
    done_ms: float


def paces(walked: Sequence[Walked]) -> dict[str, float]:
    """Micro-batches per millisecond of each worker, from lease to acceptance, so with its link in it.

    What a worker leased at once it walks one after the other, which takes until the last of it is done.
    """
    leases: dict[tuple[str, float], list[Walked]] = {}
    for one in walked:
        leases.setdefault((one.worker, one.leased_ms), []).append(one)
    done: dict[str, int] = {}
    took: dict[str, float] = {}
    for (worker, leased_ms), ones in leases.items():
        done[worker] = done.get(worker, 0) + sum(one.micro_batches for one in ones)
        took[worker] = took.get(worker, 0.0) + max(1.0, max(one.done_ms for one in ones) - leased_ms)
    return {worker: done[worker] / took[worker] for worker in done}


def divide(total: int, owners: Sequence[str], pace: Mapping[str, float]) -> tuple[int, ...]:
    """`total` micro-batches in as many sizes as there are owners, by the pace of each; at least one each.

    A worker that owns several walks them one after the other, so each of them is that much shorter. Owners of unknown
    pace count as the mean of the others. By largest remainders, the first ones first; needs `total` >= owners.
    """
    known = [pace[owner] for owner in owners if owner in pace]
    usual = float(np.mean(known)) if known else 1.0
    shares = np.array([pace.get(owner, usual) / owners.count(owner) for owner in owners])
    exact = 1 + (total - len(owners)) * shares / shares.sum()
    sizes = np.floor(exact).astype(int)
    order = np.argsort(sizes - exact, kind="stable")
    sizes[order[: total - int(sizes.sum())]] += 1
    return tuple(int(size) for size in sizes)


class Divider:
    """Learns how fast a job's workers are, and divides rounds accordingly."""

    def __init__(self) -> None:
        self._pace: dict[str, float] = {}
        self._owners: list[str] = []

    def learn(self, walked: Sequence[Walked]) -> None:
        """Take in a round's replicas, in the order of units: their workers own those of the next."""
        for worker, pace in paces(walked).items():
            before = self._pace.get(worker, pace)
            self._pace[worker] = (before * pace) ** 0.5  # one slow round is no slow machine
        self._owners[: len(walked)] = [one.worker for one in walked]

    def divide(self, total: int, count: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Sizes of `count` units that hold `total` micro-batches, and who each is for; nothing until that is known."""
        owners = self._owners[:count]
        if len(owners) < count or total < count:
            return (), ()
        return divide(total, owners, self._pace), tuple(owners)
