"""Decides which workers score checkpoints. Pure, but for reading which checkpoints wait."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from redis import Redis
from sqlalchemy import Connection, select

from api.scheduler.seat_planner import (
    Action,
    Available,
    Close,
    Demand,
    HeldSeat,
    Issue,
    Leave,
    Pair,
    Past,
    closing,
    pause_ms,
)
from api.tables import CheckpointRow, Score, table
from computeshare.evaluator.order import Due
from computeshare.protocol.keys import JobKeys
from computeshare.queue.seats import SCORING
from computeshare.types import Token

WAIT_MS = 10_000
"""How long a checkpoint waits for an evaluator before a worker may score it; it does not wait where none runs."""
TRAINING = "training"
"""Why a worker leaves a scoring seat that is wanted for training."""
CHECKPOINT, SCORE = table(CheckpointRow), table(Score)


@dataclass(frozen=True, slots=True)
class WaitingJob:
    """A job with `checkpoints` that wait for a scorer, or have one that holds a seat; `final`: the last is among
    them.
    """

    job_id: str
    queue: str
    checkpoints: int
    final: bool


def unscored(connection: Connection, jobs: Sequence[Any]) -> dict[str, list[tuple[Token, int]]]:
    """The stored checkpoints that are to be scored and have no score, with when they were stored, in ms, by job."""
    scored = (SCORE.c.job_id == CHECKPOINT.c.job_id) & (SCORE.c.token == CHECKPOINT.c.token)
    query = select(CHECKPOINT.c.job_id, CHECKPOINT.c.token, CHECKPOINT.c.version, CHECKPOINT.c.at_ms)
    query = query.outerjoin(SCORE, scored).where(SCORE.c.token.is_(None), ~CHECKPOINT.c.voided)
    rounds = {job.id: (job.rounds_total, job.spec.evaluate_every) for job in jobs}
    found: dict[str, list[tuple[Token, int]]] = {}
    for job_id, token, version, at_ms in connection.execute(query.where(CHECKPOINT.c.job_id.in_(list(rounds)))):
        last, every = rounds[job_id]
        if version == last or (version and every and version % every == 0):
            found.setdefault(job_id, []).append((Token.parse(token), at_ms))
    return found


def waiting_of(
    redis: Redis,
    jobs: Sequence[Any],
    found: Mapping[str, Sequence[tuple[Token, int]]],
    done: Collection[Due],
    scoring: Sequence[HeldSeat],
    before_ms: Mapping[str, int],
) -> list[WaitingJob]:
    """The jobs whose checkpoints wait for workers, oldest job first.

    Args:
        found: as `unscored`.
        done: checkpoints that are not to be scored now.
        scoring: the scoring seats; what others have claimed waits for nobody.
        before_ms: by job, when a checkpoint must have been stored by.
    """
    due = [
        (job, token)
        for job in jobs
        for token, at_ms in found.get(job.id, ())
        if at_ms <= before_ms[job.id] and (job.id, token) not in done
    ]
    pipeline = redis.pipeline(transaction=False)
    for job, token in due:
        pipeline.get(JobKeys(job.id).scoring(str(token)))
    holders = cast(list[bytes | None], pipeline.execute() if due else [])
    ours = {seat.id.encode() for seat in scoring}
    counts, final = Counter[str](), set[str]()
    for (job, token), holder in zip(due, holders, strict=True):
        if holder is None or holder in ours:
            counts[job.id] += 1
            if token.version == job.rounds_total:
                final.add(job.id)
    return [WaitingJob(job.id, job.queue, counts[job.id], job.id in final) for job in jobs if counts[job.id]]


def plan(
    waiting: Sequence[WaitingJob],
    demands: Sequence[Demand],
    workers: Sequence[Available],
    training: Sequence[HeldSeat],
    scoring: Sequence[HeldSeat],
    issued: Sequence[Issue] = (),
    past: Sequence[Past] = (),
    out: Collection[Pair] = (),
    barred: Collection[str] = (),
) -> list[Action]:
    """Compare the checkpoints that wait with the workers that nobody wants for training.

    Jobs whose last version waits come first, then those with the fewest scorers; a job gets a scorer for each
    checkpoint. Workers come in their order, but those whose scoring failed lately last. A scorer that is wanted for
    training leaves at once.

    Args:
        waiting, demands: oldest job first.
        issued: the seats for training that this turn issues.
        past: the scoring seats that ended lately.
        out: the pairs of job and worker that get no seat.
        barred: the workers that may not score: those of other people's machines.
    Returns: seats to close, seats whose workers are to leave, then seats to issue.
    """
    alive, wanted = {w.id: w for w in workers}, {demand.job_id: demand for demand in demands}
    closed = [c for s in scoring if (c := closing(s, alive.get(s.worker), wanted.get(s.job_id)))]
    gone = {close.seat_id for close in closed}
    kept = [seat for seat in scoring if seat.id not in gone]
    trains = Counter(seat.job_id for seat in training if not seat.leaving) + Counter(one.job_id for one in issued)
    short = [demand for demand in demands if demand.seats > trains[demand.job_id]]

    def is_wanted(worker: Available) -> bool:
        return any(one.queue in worker.queues and (one.job_id, worker.id) not in out for one in short)

    actions: list[Action] = list(closed)
    for seat in kept:
        worker = alive[seat.worker]
        if not seat.leaving and (worker.off or is_wanted(worker)):
            waits = seat.state in ("pending", "queued")
            actions.append(
                Close(seat.id, "stopped", stop=True) if waits else Leave(seat.id, None, worker.off or TRAINING)
            )
    taken = {seat.worker for seat in (*training, *kept)} | {one.worker for one in issued}
    known = gone | {seat.id for seat in past}
    free = [
        w
        for w in workers
        if w.works and w.id not in taken and w.id not in barred and (w.seat is None or w.seat in known)
        if not is_wanted(w)
    ]
    ended = [*past, *(Past(s.id, s.job_id, s.worker, s.state, 0) for s in scoring if s.id in gone)]
    scorers = Counter(seat.job_id for seat in kept)
    return [*actions, *_issues(waiting, free, scorers, ended, out)]


def _issues(
    waiting: Sequence[WaitingJob],
    free: Sequence[Available],
    scorers: Counter[str],
    past: Sequence[Past],
    out: Collection[Pair],
) -> Iterator[Issue]:
    failures = Counter(seat.worker for seat in past if seat.state == "failed")
    for worker in sorted(free, key=lambda one: failures[one.id]):
        fit = [
            one
            for one in waiting
            if one.checkpoints > scorers[one.job_id]
            and one.queue in worker.queues
            and (one.job_id, worker.id) not in out
            and not pause_ms(one.job_id, worker.id, past)
        ]
        if fit:
            chosen = min(fit, key=lambda one: (not one.final, scorers[one.job_id]))
            scorers[chosen.job_id] += 1
            yield Issue(chosen.job_id, worker.id, SCORING)
