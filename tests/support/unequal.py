"""A job's rounds by workers that are not equally fast, on the real scripts, in a time that passes by hand.

A unit takes a worker minutes, and the broker's clock is put on by so much, so that the milliseconds that a test takes
itself do not matter: what is counted is who did what, and how long a round took.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from computeshare.protocol.reducer_session import ReducerSession
from computeshare.protocol.worker_session import Grant
from tests.support.rounds import age, current

UNIT_MS = 100_000
QUARTER = {"a": 1, "b": 1, "c": 1, "slow": 4}
"""How many times as long as the fastest each worker takes: the last has a quarter of the others' speed."""
HEARS_MS = 1000
"""After which a worker hears that others have done its work."""


@dataclass(frozen=True, slots=True)
class Hand:
    """A worker: how it asks for a lease, and computes and submits one."""

    lease: Callable[[], Grant]
    submit: Callable[[Grant], str]


@dataclass(slots=True)
class Course:
    """What came of some rounds: how long each took, in units of the fastest worker; who did how many units of them, and
    how many were done for nothing.
    """

    rounds: list[float] = field(default_factory=list)
    done: list[Counter[str]] = field(default_factory=list)
    wasted: int = 0


class Unequal:
    """Workers of these names, each of which takes `slowness` times UNIT_MS for a unit."""

    def __init__(self, reducer: ReducerSession, hands: dict[str, Hand], slowness: dict[str, float]) -> None:
        self.reducer, self.hands, self.slowness = reducer, hands, slowness
        self.course = Course()

    def play(self, order: Sequence[str] = ("slow", "a", "b", "c")) -> None:
        """One round, until it has all its units; who asks first comes first in `order`."""
        now, total = 0.0, current(self.reducer).total
        asking = [(0.0, place, worker) for place, worker in enumerate(name for name in order if name in self.hands)]
        turns, turn_of = len(asking), {worker: place for _, place, worker in asking}
        work: dict[str, Grant] = {}
        done: Counter[str] = Counter()

        def then(worker: str, at_ms: float) -> None:
            nonlocal turns
            turns += 1
            turn_of[worker] = turns
            heapq.heappush(asking, (at_ms, turns, worker))

        while len(received := self.reducer.progress()[1]) < total:
            for other in [name for name, grant in work.items() if set(grant.micro_batches) <= set(received)]:
                self.course.wasted += len(work.pop(other).micro_batches)
                then(other, now + HEARS_MS)
            at, turn, worker = heapq.heappop(asking)
            if turn != turn_of[worker]:
                continue  # it was called off
            self._pass(at - now)
            now = at
            if grant := work.pop(worker, None):
                outcome = self.hands[worker].submit(grant)
                done[worker] += len(grant.micro_batches) if outcome == "accepted" else 0
                then(worker, now)
                continue
            grant = self.hands[worker].lease()
            if grant.micro_batches:
                work[worker] = grant
            takes_ms = len(grant.micro_batches) * UNIT_MS * self.slowness[worker]
            then(worker, now + (takes_ms or grant.ask_again_ms))
        self.course.rounds.append(now / UNIT_MS)
        self.course.done.append(done)
        self.course.wasted += sum(len(grant.micro_batches) for grant in work.values())

    def _pass(self, by_ms: float) -> None:
        age(self.reducer, round(by_ms), runs_out=False)
