"""Which workers hold which stages: chains of workers, each with all stages of the model, in order. Pure."""

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

MOST_ORDERED = 5
"""Up to so many workers, all orders of a chain are tried; of more, a few."""
WORTH = 1.25
"""How much faster a placement must promise to be to replace one that works."""
MALFORMED = ValueError, KeyError, TypeError, ArithmeticError, RecursionError
"""Exceptions that may be raised while another worker's JSON is read."""
LEAST, MOST = 1e-30, 1e30
"""A worker's memory and rate lie between, or are 0, so that sums and quotients of them stay finite."""


@dataclass(frozen=True, slots=True)
class StageDemand:
    """A stage's needs of the worker that holds it: memory in bytes, and work in any unit, the same for all stages."""

    bytes: int
    work: float


@dataclass(frozen=True, slots=True)
class StageWorker:
    """A worker that is there to hold stages.

    `room_bytes` is its memory for them (0: no limit known), `rate` its measured work per second (0: not measured).
    """

    worker: str
    session: str
    room_bytes: int = 0
    rate: float = 0.0

    @classmethod
    def parse(cls, worker: str, session: str, about: str | bytes) -> "StageWorker | None":
        """A member as its worker describes it, in JSON; None: the description is malformed."""
        try:
            found = json.loads(about)
            room_bytes, rate = int(found["room_bytes"]), float(found["rate"])
        except MALFORMED:
            return None
        is_sound = all(value == 0 or LEAST <= value <= MOST for value in (room_bytes, rate))
        return cls(worker, session, room_bytes, rate) if is_sound else None


@dataclass(frozen=True, slots=True)
class Held:
    """A worker's run of stages, `first` up to but without `stop`."""

    worker: str
    session: str
    first: int
    stop: int

    @property
    def stages(self) -> range:
        return range(self.first, self.stop)


@dataclass(frozen=True, slots=True)
class Placement:
    """Chains of workers. In each, the first worker leads: it has the first stage, and leases micro-batches."""

    number: int
    chains: tuple[tuple[Held, ...], ...] = ()

    def chain_of(self, session: str) -> tuple[Held, ...]:
        """The chain to which a session belongs; empty: to none, it stands by."""
        return next((chain for chain in self.chains if any(one.session == session for one in chain)), ())

    def dump(self) -> str:
        """All but the number, as JSON."""
        chains = [[asdict(one) for one in chain] for chain in self.chains]
        return json.dumps({"chains": chains}, separators=(",", ":"))

    @classmethod
    def parse(cls, number: int, plan: str | bytes, stages: int) -> "Placement | None":
        """A placement of so many stages, as a worker wrote it (empty: nobody has); None: it is malformed."""
        if not plan:
            return cls(number)
        try:
            chains = tuple(tuple(map(_held, chain)) for chain in json.loads(plan)["chains"])
        except MALFORMED:
            return None
        return cls(number, chains) if all(_is_whole(chain, stages) for chain in chains) else None


def circumstances(members: Sequence[StageWorker]) -> tuple[tuple[str, int, int | None], ...]:
    """The facts on which a placement depends: the members' sessions, and each member's memory and speed, the speed to a
    factor of two. While these facts are unchanged, another placement is not worth a look.
    """
    octaves = (math.floor(math.log2(one.rate)) if one.rate > 0 else None for one in members)
    return tuple((one.session, one.room_bytes, octave) for one, octave in zip(members, octaves, strict=True))


def place(
    members: Sequence[StageWorker], stages: Sequence[StageDemand], most_chains: int
) -> tuple[tuple[Held, ...], ...]:
    """Form chains: as many as there are workers for, but `most_chains`; with fewer workers than stages, one whose
    workers hold several consecutive stages. Workers without a place stand by. Empty: the stages do not fit.

    In a chain, the time of the slowest worker is the least that is possible within each worker's memory. The members'
    order does not matter.
    """
    able = sorted(_rated(members), key=lambda one: (-one.rate, -one.room_bytes, one.worker))
    for count in range(max(1, min(most_chains, len(able) // len(stages))), 0, -1):
        chains = [_chain(able[place::count], stages) for place in range(count)]
        if all(chains):
            return tuple(chains)
    return ()


def chain_seconds(chain: Sequence[Held], members: Sequence[StageWorker], stages: Sequence[StageDemand]) -> float:
    """How long the slowest worker of a chain takes for a micro-batch, were it not to wait for others."""
    rates = {one.session: one.rate for one in _rated(members)}
    return max(sum(stages[one].work for one in held.stages) / rates[held.session] for held in chain)


def successor(
    old: Placement, members: Sequence[StageWorker], stages: Sequence[StageDemand], most_chains: int
) -> Placement | None:
    """The placement to replace `old`, where one of its workers has gone, or if it promises to be faster by `WORTH`.
    None: `old` stays.
    """
    there = {one.session for one in members}
    works = bool(old.chains) and all(held.session in there for chain in old.chains for held in chain)
    chains = place(members, stages, most_chains)
    new = Placement(old.number + 1, chains)
    if not works:
        return new if chains or old.chains else None
    if not chains:
        return None
    before, after = (_speed(each, members, stages) for each in (old.chains, chains))
    return new if after > WORTH * before else None


def _speed(chains: Sequence[Sequence[Held]], members: Sequence[StageWorker], stages: Sequence[StageDemand]) -> float:
    """Micro-batches per second of all chains."""
    return sum(1 / chain_seconds(chain, members, stages) for chain in chains)


def _rated(members: Sequence[StageWorker]) -> list[StageWorker]:
    """The members, each with a rate: those not measured have the mean of the others'."""
    known = [one.rate for one in members if one.rate > 0]
    usual = sum(known) / len(known) if known else 1.0
    return [StageWorker(one.worker, one.session, one.room_bytes, one.rate or usual) for one in members]


def _held(said: Any) -> Held:
    """Raises one of `MALFORMED`: it is none."""
    first, stop = int(said["first"]), int(said["stop"])
    return Held(str(said["worker"]), str(said["session"]), first, stop)


def _is_whole(chain: Sequence[Held], stages: int) -> bool:
    """Whether a chain has all stages, in order."""
    borders = [0, *(one.stop for one in chain)]
    return borders[-1] == stages and all(
        start == one.first < one.stop for start, one in zip(borders, chain, strict=False)
    )


def _chain(members: Sequence[StageWorker], stages: Sequence[StageDemand]) -> tuple[Held, ...]:
    """The fastest chain of some of these members; empty: the stages do not fit."""
    best, found = math.inf, ()  # type: tuple[float, tuple[Held, ...]]
    for order in _orders(members):
        seconds, stops = _divided(order, stages)
        if seconds < best:
            best = seconds
            runs = zip(order, [0, *stops], stops, strict=False)
            found = tuple(Held(one.worker, one.session, start, stop) for one, start, stop in runs if start < stop)
    return found


def _orders(members: Sequence[StageWorker]) -> Iterator[Sequence[StageWorker]]:
    if len(members) <= MOST_ORDERED:
        yield from itertools.permutations(members)
        return
    by_room = sorted(members, key=lambda one: -(one.room_bytes or math.inf))
    for order in (members, by_room):
        yield order
        yield order[::-1]


def _divided(order: Sequence[StageWorker], stages: Sequence[StageDemand]) -> tuple[float, list[int]]:
    """How long the slowest of these workers takes if the stages are divided best in this order, and where each one's
    run of stages stops; a run may be empty. Infinity: the stages do not fit.
    """
    count = len(stages)
    works, needs = (
        [0.0, *itertools.accumulate(one.work for one in stages)],
        [0, *itertools.accumulate(one.bytes for one in stages)],
    )
    best: list[tuple[float, list[int]]] = [(0.0, []), *((math.inf, []) for _ in stages)]
    for member in order:
        following: list[tuple[float, list[int]]] = []
        for stop in range(count + 1):
            options: list[tuple[float, list[Any]]] = [
                (max(best[start][0], (works[stop] - works[start]) / member.rate), [*best[start][1], stop])
                for start in range(stop + 1)
                if start == stop or not member.room_bytes or needs[stop] - needs[start] <= member.room_bytes
            ]
            following.append(min(options, key=lambda option: option[0]))
        best = following
    return best[count]
