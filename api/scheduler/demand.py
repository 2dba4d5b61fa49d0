"""Computes the jobs' demands for workers from their state in SQLite and in the broker."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from sqlalchemy import Engine, func, select, type_coerce

from api.publication.outbox import SEAT
from api.publication.publication import JobInBroker
from api.scheduler.seat_planner import Demand
from api.scheduler.seat_writer import seats_wanted
from api.stored_specs import StoredSpec
from api.tables import ACTIVE, JOB, WORKER
from computeshare.queue import WorkerInfo
from computeshare.types import ENDED

PAST_MS = 120_000
"""How far back ended seats are read."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The scheduler's view of SQLite: active jobs (oldest first, `spec` as of `StoredSpec`), ids of paused jobs, open
    seats, recently ended seats, and the (job, worker) rows of workers that take part.
    """

    jobs: Sequence[Any]
    paused: Sequence[str]
    seats: Sequence[Any]
    past: Sequence[Any]
    present: Sequence[Any]

    @classmethod
    def read(cls, engine: Engine, now: int) -> Self:
        """Read the current state; `now` in milliseconds."""
        with engine.connect() as connection:
            names = ("id", "queue", "status", "reason", "reason_code", "missing_workers", "version", "rounds_total")
            about = [JOB.c[name] for name in (*names, "started_ms", "stages")]
            spec = type_coerce(JOB.c.spec, StoredSpec).label("spec")
            wanting = select(*about, spec).where(JOB.c.status.in_(ACTIVE))
            jobs = connection.execute(wanting.order_by(JOB.c.created_ms, JOB.c.id)).all()
            paused = connection.scalars(select(JOB.c.id).where(JOB.c.status == "paused")).all()
            stopped = func.coalesce(JOB.c.finished_ms, JOB.c.paused_ms).label("stopped_ms")
            with_end = select(SEAT, stopped).join(JOB, JOB.c.id == SEAT.c.job_id)
            seats = connection.execute(with_end.where(SEAT.c.ended_ms.is_(None))).all()
            past = connection.execute(select(SEAT).where(SEAT.c.ended_ms > now - PAST_MS)).all()
            taking_part = select(WORKER.c.job_id, WORKER.c.worker, WORKER.c.joined_ms).join(
                JOB, JOB.c.id == WORKER.c.job_id
            )
            open_ended = JOB.c.status.not_in(ENDED)
            present = connection.execute(taking_part.where(open_ended, WORKER.c.left_ms.is_(None))).all()
        return cls(jobs, paused, seats, past, present)


def demands_of(
    stored: Stored, published: Mapping[str, JobInBroker], workers: Sequence[WorkerInfo], now: int
) -> list[Demand]:
    """The demand of each active job, oldest job first; `workers` are the online workers."""
    moved = _moved(stored, now)
    machines = {worker.id: worker.machine for worker in workers}
    met: dict[str, dict[str, int]] = {}
    demands = []
    for job in stored.jobs:
        demand = _demand(job, published[job.id], moved.get(job.id))
        if prefers := job.spec.prefers:
            text = prefers.model_dump_json()
            if text not in met:
                met[text] = {worker: count for worker, one in machines.items() if (count := prefers.met(one))}
            demand = replace(demand, prefers=met[text])
        demands.append(demand)
    return demands


def is_finished(job: Any, published: JobInBroker) -> bool:
    """Whether all rounds of a job are done."""
    return bool(published.status == "finished" or job.version >= job.rounds_total)


def _demand(job: Any, published: JobInBroker, moved_ms: int | None) -> Demand:
    spec = job.spec
    has_room = published.known or not published.no_room
    wanted = has_room and not is_finished(job, published)
    return Demand(
        job_id=job.id,
        queue=job.queue,
        seats=seats_wanted(spec) if wanted else 0,
        minimum=spec.workers.min,
        started=job.started_ms is not None,
        priority=spec.priority,
        moved_ms=moved_ms,
        requires=spec.requires.told if spec.requires else "",
    )


def _moved(stored: Stored, now: int) -> dict[str, int]:
    """Milliseconds since a worker was last asked to change over from or to a job, by job."""
    found: dict[str, int] = {}
    for seat in (*stored.seats, *stored.past):
        if seat.left_to:
            for job_id in (seat.job_id, seat.left_to):
                found[job_id] = min(found.get(job_id, now), now - seat.leaving_ms)
    return found
