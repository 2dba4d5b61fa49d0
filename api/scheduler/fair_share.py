"""Divides the available workers among jobs: by priority, and max-min fairly within a priority. Pure.

Jobs and the workers that may serve them form a bipartite graph: the jobs of one queue share its workers, and a worker
of two queues connects the queues. So one more worker for a job may mean that other workers change jobs; `route` finds
the fewest changes.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

Owners = dict[str, str]
"""Worker to the job that it serves or will serve."""


@dataclass(frozen=True, slots=True)
class SeatDemand:
    """A job's demand: at most `seats` workers out of `serving` (the best first), and none if fewer than `minimum`.

    `holds` is the job's current number of workers.
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
        """The least number of workers: with fewer, the job gets none."""
        return min(self.minimum, self.seats)


@dataclass(frozen=True, slots=True)
class SeatMove:
    """`taker` gets `worker` from `giver`, or from no job if `giver` is None."""

    worker: str
    taker: str
    giver: str | None


Graph = Mapping[str, Sequence[str]]
"""Job to the workers that may serve it."""
Spare = Callable[[str], int]
"""How readily a job gives a worker away: the job with the largest value gives first; 0 means never."""


Refused = dict[tuple[str, ...], int]
"""Number of workers refused to a job, by the workers that may serve the job. Another job with the same workers would be
refused as many: workers given to a job are not taken back.
"""


def nothing_to_spare(_job_id: str) -> int:
    return 0


def transfer_path(taker: str, graph: Graph, owners: Owners, spare: Spare = nothing_to_spare) -> list[SeatMove]:
    """The fewest steps that give `taker` one more worker, where only a job that can spare a worker ends with fewer.

    Breadth-first search for an augmenting path in the bipartite graph.

    Returns: the taker's step first, then each giver's own gain; empty if there is no path.
    """
    came: dict[str, SeatMove] = {}
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
                    return _way(taker, came, SeatMove(worker, job, None))
                taken.append((giver, SeatMove(worker, job, giver)))
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


def _way(taker: str, came: Mapping[str, SeatMove], last: SeatMove) -> list[SeatMove]:
    steps = [last]
    while steps[0].taker != taker:
        steps.insert(0, came[steps[0].taker])
    return steps


def take(owners: Owners, steps: Iterable[SeatMove]) -> None:
    """Apply the steps to `owners`."""
    owners.update({step.worker: step.taker for step in steps})


def shares(wants: Sequence[SeatDemand]) -> dict[str, int]:
    """The number of workers that each job is due, by job id.

    The highest priority is served first. Among jobs of one priority, each job gets its minimum or is passed over:
    started jobs first, then the oldest. After that the job with the fewest workers gets the next worker, so that no job
    could gain a worker unless a job with no more workers lost one (max-min fairness). The remaining workers go to jobs
    that have begun and cannot get their minimum: such a job keeps its workers while no other job needs them.

    Args:
        wants: oldest job first.
    """
    graph = {want.job_id: want.serving for want in wants}
    owners: Owners = {}
    refused: Refused = {}
    passed: list[list[SeatDemand]] = []
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


def _gets_minimum(want: SeatDemand, graph: Graph, owners: Owners, refused: Refused) -> bool:
    """Give a job its minimum number of workers, or none; returns whether it got the minimum."""
    if want.fewest >= refused.get(want.serving, want.fewest + 1):
        return False
    for _ in range(want.fewest):
        steps = transfer_path(want.job_id, graph, owners)
        if not steps:
            for worker in [worker for worker, job in owners.items() if job == want.job_id]:
                del owners[worker]
            refused[want.serving] = want.fewest
            return False
        take(owners, steps)
    return True


def _fill(wants: Sequence[SeatDemand], graph: Graph, owners: Owners) -> None:
    """Give the job with the fewest workers one more, until no job can get more; on a tie, first a job that already
    holds the extra worker.
    """
    counts = Counter(owners.values())
    hungry = list(wants)
    while hungry:
        want = min(hungry, key=lambda want: (counts[want.job_id], want.holds <= counts[want.job_id]))
        steps = transfer_path(want.job_id, graph, owners) if counts[want.job_id] < want.seats else []
        if not steps:  # nor later, as given workers are not taken back; nor will other jobs of the same workers
            full = want.serving if counts[want.job_id] < want.seats else None
            hungry = [other for other in hungry if other is not want and other.serving != full]
        else:
            take(owners, steps)
            counts[want.job_id] += 1


def settle(
    wants: Sequence[SeatDemand], counts: Mapping[str, int], owners: Owners, may: Callable[[list[SeatMove]], bool]
) -> Owners:
    """The next assignment of workers to jobs, with as few changes as possible, so that every job reaches its share.

    Args:
        counts: each job's share.
        owners: the current assignment, of these jobs only.
        may: whether steps that take a worker from a job may be made now; the first step is the asking job's. A worker
            that a job got in this same call is not asked about.
    Returns: the assignment after all permitted steps; each job gives or gets at most one worker of another job.
    """
    graph, priority = {want.job_id: want.serving for want in wants}, {want.job_id: want.priority for want in wants}
    held, owners, most = owners, dict(owners), max(priority.values(), default=0)
    has = Counter(owners.values())
    changed: set[str] = set()

    def spare(job_id: str) -> int:
        return 1 + most - priority[job_id] if has[job_id] > counts[job_id] else 0

    for want in sorted(wants, key=lambda want: -want.priority):
        while has[want.job_id] < counts[want.job_id]:
            steps = transfer_path(want.job_id, graph, owners, spare)
            givers = {step.giver for step in steps if step.giver and step.worker in held}
            concerned = {want.job_id, *givers} if givers else set()
            if not steps or concerned & changed or (givers and not may(steps)):
                break
            take(owners, steps)
            has = Counter(owners.values())
            changed |= concerned
    return owners
