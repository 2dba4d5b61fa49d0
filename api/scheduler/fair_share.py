"""How the workers there are go to the jobs that want some: by priority, and fairly among equals. Pure.

Which worker may serve which job is a graph with two sides: jobs of one queue share its workers, and a worker of two
queues ties them together. So one more worker for a job may mean that others change places; `route` finds the fewest.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

Owners = dict[str, str]
"""Worker to the job that it serves, or is to serve."""


@dataclass(frozen=True, slots=True)
class Want:
    """What a job could use: `seats` workers at most, of those `serving` it (the best first); below `minimum` none.

    `holds` says how many it has.
    """

    job_id: str
    priority: int
    seats: int
    minimum: int
    started: bool
    serving: tuple[str, ...]
    holds: int = 0

    @property
    def fewest(self) -> int:
        """With fewer workers than this the job gets none."""
        return min(self.minimum, self.seats)


@dataclass(frozen=True, slots=True)
class Step:
    """`taker` gets `worker`, which `giver` has, or nobody."""

    worker: str
    taker: str
    giver: str | None


Graph = Mapping[str, Sequence[str]]
"""Job to the workers that may serve it."""
Spare = Callable[[str], int]
"""How gladly a job gives a worker away, the larger the sooner; 0: it does not."""


Refused = dict[tuple[str, ...], int]
"""How many workers a job was refused, by the workers that may serve it. Another job that the same workers may serve
would be refused as many, too: what is given to a job is not taken back.
"""


def nothing_to_spare(_job_id: str) -> int:
    return 0


def route(taker: str, graph: Graph, owners: Owners, spare: Spare = nothing_to_spare) -> list[Step]:
    """The fewest steps by which `taker` gets one worker more, and nobody has fewer but a job that can spare one.

    Returns: the taker's step first, each giver's own gain after it; nothing if there is no way.
    """
    came: dict[str, Step] = {}
    seen: set[str] = set()
    visited, takers = {taker}, [taker]
    while takers:
        taken = []
        for job in takers:
            for worker in graph[job]:
                if worker in seen:
                    continue
                seen.add(worker)
                giver = owners.get(worker)
                if giver is None:
                    return _way(taker, came, Step(worker, job, None))
                taken.append((giver, Step(worker, job, giver)))
        glad = max(taken, key=lambda pair: spare(pair[0]), default=None)
        if glad and spare(glad[0]):
            return _way(taker, came, glad[1])
        takers = []
        for giver, step in taken:
            if giver in graph and giver not in visited:
                visited.add(giver)
                came[giver] = step
                takers.append(giver)
    return []


def _way(taker: str, came: Mapping[str, Step], last: Step) -> list[Step]:
    steps = [last]
    while steps[0].taker != taker:
        steps.insert(0, came[steps[0].taker])
    return steps


def take(owners: Owners, steps: Iterable[Step]) -> None:
    """Let the steps be made."""
    owners.update({step.worker: step.taker for step in steps})


def shares(wants: Sequence[Want]) -> dict[str, int]:
    """How many workers each job is to have.

    The highest priority is served first. Among jobs of one priority each gets its minimum or is passed over, those that
    have begun before those that have not, then the oldest; from then on whoever has the fewest gets the next worker, so
    that no job could have more without another, which has no more than it, having less (max-min fair). What is left
    goes to jobs that have begun and cannot have their minimum: they keep their place while nobody else needs it.

    Args:
        wants: oldest job first.
    """
    graph = {want.job_id: want.serving for want in wants}
    owners: Owners = {}
    refused: Refused = {}
    passed: list[list[Want]] = []
    for _, group in groupby(sorted(wants, key=lambda want: -want.priority), key=lambda want: want.priority):
        members = list(group)
        in_line = sorted(members, key=lambda want: not want.started)
        able = {want.job_id for want in in_line if _gets_minimum(want, graph, owners, refused)}
        _fill([want for want in members if want.job_id in able], graph, owners)
        begun = [want for want in members if want.started or want.holds]
        passed.append([want for want in begun if want.job_id not in able])
    for members in passed:
        _fill(members, graph, owners)
    counts = Counter(owners.values())
    return {want.job_id: counts[want.job_id] for want in wants}


def _gets_minimum(want: Want, graph: Graph, owners: Owners, refused: Refused) -> bool:
    """Give a job its minimum, or nothing."""
    if want.fewest >= refused.get(want.serving, want.fewest + 1):
        return False
    for _ in range(want.fewest):
        steps = route(want.job_id, graph, owners)
        if not steps:
            for worker in [worker for worker, job in owners.items() if job == want.job_id]:
                del owners[worker]
            refused[want.serving] = want.fewest
            return False
        take(owners, steps)
    return True


def _fill(wants: Sequence[Want], graph: Graph, owners: Owners) -> None:
    """Give whoever has the fewest one more, until nobody can have more; of equals those that have it already."""
    counts = Counter(owners.values())
    hungry = list(wants)
    while hungry:
        want = min(hungry, key=lambda want: (counts[want.job_id], want.holds <= counts[want.job_id]))
        steps = route(want.job_id, graph, owners) if counts[want.job_id] < want.seats else []
        if not steps:  # nor later: what is taken stays taken; nor will others whom the same workers may serve
            full = want.serving if counts[want.job_id] < want.seats else None
            hungry = [other for other in hungry if other is not want and other.serving != full]
        else:
            take(owners, steps)
            counts[want.job_id] += 1


def settle(
    wants: Sequence[Want], counts: Mapping[str, int], owners: Owners, may: Callable[[list[Step]], bool]
) -> Owners:
    """Who is to serve whom next, with as few changes as possible, so that every job gets to its share.

    Args:
        counts: the shares.
        owners: who serves whom now, of these jobs.
        may: whether steps that take a worker from a job may be made now; the first is that of the job that asks.
    Returns: the owners after all steps that may be made; each job gives or gets one worker of another at most.
    """
    graph, priority = {want.job_id: want.serving for want in wants}, {want.job_id: want.priority for want in wants}
    owners, most = dict(owners), max(priority.values(), default=0)
    has = Counter(owners.values())
    changed: set[str] = set()

    def spare(job_id: str) -> int:
        return 1 + most - priority[job_id] if has[job_id] > counts[job_id] else 0

    for want in sorted(wants, key=lambda want: -want.priority):
        while has[want.job_id] < counts[want.job_id]:
            steps = route(want.job_id, graph, owners, spare)
            givers = {step.giver for step in steps if step.giver}
            concerned = {want.job_id, *givers} if givers else set()
            if not steps or concerned & changed or (givers and not may(steps)):
                break
            take(owners, steps)
            has = Counter(owners.values())
            changed |= concerned
    return owners
