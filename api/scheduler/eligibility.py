"""Which workers get no seat in which job, and why: banned, on an unfit machine, unable to start, without what the job
requires, or without their owner's consent to its recipe.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from sqlalchemy import Connection, func, select

from api.scheduler import recipe_seats
from api.scheduler.machines import admitted_machines
from api.scheduler.seat_planner import Pair
from api.scheduler.start_backoff import SeatTry, failing
from api.tables import ACTIVE, JOB, TELLING, WORKER, Event, SeatRow, table
from computeshare import errors
from computeshare.jobspec.machine_needs import Needs, device_type
from computeshare.jobspec.memory_estimate import does_not_fit, seat_bytes, stages_that_fit
from computeshare.jobspec.spec import JobSpec
from computeshare.queue import WorkerInfo
from computeshare.queue.seats import SCORING
from computeshare.strategies.registry import stored
from computeshare.types import machine_of

TRIED_MS = 3 * 3600 * 1000
"""How far back failed seats are counted; the longest time that a worker is left out is much shorter."""
SHOWN = 3
"""The number of workers, and of causes, named in a reason; further ones are only counted."""
FAILED = "failed: "
"""Prefix of a worker's reason for leaving a job where an error ended its seat."""

_ONE = re.compile(r"(.+?)( cannot start| cannot take part): (.+)", re.DOTALL)
"""A text on a single worker."""

SEAT, EVENT = table(SeatRow), table(Event).c


@dataclass(frozen=True, slots=True)
class Excluded:
    """For active jobs: why a worker cannot take part (`reasons`), and the pairs that get no seat at present (`now`)."""

    reasons: dict[Pair, str]
    troubles: dict[Pair, str]
    """`reasons` without the bans."""
    now: frozenset[Pair]
    lacking: dict[Pair, str] = field(default_factory=dict)
    """The part of `reasons` that follows from what jobs require."""
    unmet: dict[str, str] = field(default_factory=dict)
    """Missing requirements by job, for jobs whose queue has workers, none of which meets the requirements."""
    hopeless: dict[str, str] = field(default_factory=dict)
    """Why jobs are given up whose recipes fail on every worker that tries."""

    def trouble(self, job_id: str) -> str | None:
        """The troubles of workers in a job, as one text; None if there are none."""
        return "; ".join(shown(why for pair, why in self.troubles.items() if pair[0] == job_id)) or None


def shown(texts: Iterable[str]) -> list[str]:
    """At most `SHOWN` of the texts on single workers, and how many are left out. Workers with the same cause share a
    text: `mac-1, mac-2 cannot start: CAUSE`.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for text in texts:
        one = _ONE.fullmatch(text)
        groups.setdefault((one[2], one[3]) if one else ("", text), []).append(one[1] if one else "")
    told = [f"{_named(names)}{verb}: {cause}" if verb else cause for (verb, cause), names in groups.items()]
    rest = sum(map(len, list(groups.values())[SHOWN:]))
    return told[:SHOWN] + ([f"{rest} more cannot take part"] if rest else [])


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def excluded(connection: Connection, workers: Sequence[WorkerInfo], now_ms: int) -> Excluded:
    """Check bans, requirements, memory limits and recent seats; `workers` are the online workers."""
    names = {worker.id: worker.name or worker.id for worker in workers}
    stuck = failing(_tries(connection, now_ms))
    troubles = {
        pair: f"{names[pair[1]]} cannot start: {_last_words(connection, pair)}" for pair in stuck if pair[1] in names
    }
    bans, unfit = _bans(connection, workers), _too_small(connection, workers) | _unfit(connection, names)
    troubles |= unfit
    troubles |= (outside := _outside(connection, workers))
    lacking, unmet = _lacking(connection, workers)
    resting = {pair for pair, streak in stuck.items() if now_ms < streak.until_ms}
    recipes = recipe_seats.recipe_jobs(connection)
    unwilling = recipe_seats.unwilling(recipes, workers) | recipe_seats.without_package(recipes, workers)
    failed = recipe_seats.failures(connection, recipes)
    broken, paused = recipe_seats.left_out(failed, names, now_ms)
    troubles |= broken
    never = bans.keys() | unfit.keys() | outside.keys() | lacking.keys() | unwilling.keys()
    able = {
        job.id: {w.id for w in workers if _can_serve(w, job.queue) and (job.id, w.id) not in never} for job in recipes
    }
    hopeless = recipe_seats.hopeless(failed, recipes, able, _working(connection), names)
    reasons = troubles | bans | lacking | unwilling
    return Excluded(reasons, troubles, frozenset(resting | paused | never), lacking, unmet, hopeless)


def _working(connection: Connection) -> set[Pair]:
    """The workers that take part in active jobs."""
    query = select(WORKER.c.job_id, WORKER.c.worker).join(JOB, JOB.c.id == WORKER.c.job_id)
    return {
        (row.job_id, row.worker)
        for row in connection.execute(query.where(JOB.c.status.in_(ACTIVE), WORKER.c.left_ms.is_(None)))
    }


def _can_serve(worker: WorkerInfo, queue: str) -> bool:
    return queue in worker.queues and not worker.resting and not worker.refusal


def _bans(connection: Connection, workers: Sequence[WorkerInfo]) -> dict[Pair, str]:
    """The bans, each of all online workers of the banned worker's machine."""
    query = select(WORKER.c.job_id, WORKER.c.worker, WORKER.c.name, WORKER.c.banned)
    query = query.join(JOB, JOB.c.id == WORKER.c.job_id)
    rows = connection.execute(query.where(JOB.c.status.in_(ACTIVE), WORKER.c.banned.is_not(None)))
    alike: dict[str, list[str]] = {}
    for worker in workers:
        alike.setdefault(machine_of(worker.id), []).append(worker.id)
    return {
        (row.job_id, worker): f"{row.name or row.worker} is banned ({row.banned}): "
        f"lift the ban with computeshare jobs unban {row.job_id} {row.worker}"
        for row in rows
        for worker in (row.worker, *alike.get(machine_of(row.worker), ()))
    }


def _lacking(connection: Connection, workers: Sequence[WorkerInfo]) -> tuple[dict[Pair, str], dict[str, str]]:
    """The workers without what a job of their queue requires, and the jobs that no worker can serve for that reason."""
    requires = func.json_extract(JOB.c.spec, "$.requires")
    query = select(JOB.c.queue, requires, JOB.c.id).where(JOB.c.status.in_(ACTIVE), requires.is_not(None))
    alike: dict[tuple[str, str], list[str]] = {}
    for queue, text, job_id in connection.execute(query):
        alike.setdefault((queue, text), []).append(job_id)
    lacking: dict[Pair, str] = {}
    unmet: dict[str, str] = {}
    for (queue, text), jobs in alike.items():
        needs = Needs.model_validate_json(text)
        serving = [worker for worker in workers if queue in worker.queues]
        missing = [(worker, why) for worker in serving if (why := needs.lacking(worker.machine))]
        for worker, why in missing:
            told = f"{worker.name or worker.id} cannot take part: it {' and '.join(why)}"
            lacking |= {(job_id, worker.id): told for job_id in jobs}
        if serving and len(missing) == len(serving):
            unmet |= dict.fromkeys(jobs, needs.unmet([worker.machine for worker in serving]))
    return lacking, unmet


def _outside(connection: Connection, workers: Sequence[WorkerInfo]) -> dict[Pair, str]:
    """Workers of invited machines, in jobs of their queues whose model is spread over workers: the gateway carries no
    values between stages.
    """
    invited = admitted_machines(connection)
    there = [worker for worker in workers if machine_of(worker.id) in invited]
    if not there:
        return {}
    rows = connection.execute(select(JOB.c.id, JOB.c.queue, JOB.c.spec).where(JOB.c.status.in_(ACTIVE))).all()
    jobs = [(row.id, row.queue) for row in rows if stored(row.spec).staging]
    why = (
        "machines that joined by an invite hold no stages of a model. Start the machine's worker with the broker's "
        "address (--redis-url), or choose another strategy"
    )
    return {
        (job, one.id): f"{one.name or one.id} cannot take part: {why}"
        for job, queue in jobs
        for one in there
        if queue in one.queues
    }


def _unfit(connection: Connection, names: Mapping[str, str]) -> dict[Pair, str]:
    """Online workers that reported their machine unfit for a job: another try would change nothing."""
    query = select(WORKER.c.job_id, WORKER.c.worker, WORKER.c.unfit).join(JOB, JOB.c.id == WORKER.c.job_id)
    rows = connection.execute(query.where(JOB.c.status.in_(ACTIVE), WORKER.c.unfit.is_not(None)))
    return {
        (row.job_id, row.worker): f"{names[row.worker]} cannot take part: {row.unfit}"
        for row in rows
        if row.worker in names
    }


def _too_small(connection: Connection, workers: Sequence[WorkerInfo]) -> dict[Pair, str]:
    """Workers whose memory limit is below the need of a job of their queues: the need measured on a device of the same
    type, or else the estimate's lower bound.
    """
    limited = [worker for worker in workers if worker.max_memory_bytes]
    if not limited:
        return {}
    jobs = connection.execute(select(JOB.c.id, JOB.c.queue, JOB.c.spec).where(JOB.c.status.in_(ACTIVE))).all()
    measured: dict[tuple[str, str], int] = {}
    query = select(WORKER.c.job_id, WORKER.c.device, func.max(WORKER.c.memory_bytes)).join(
        JOB, JOB.c.id == WORKER.c.job_id
    )
    query = query.where(JOB.c.status.in_(ACTIVE), WORKER.c.accepted > 0, WORKER.c.memory_bytes.is_not(None))
    for job_id, device, taken in connection.execute(query.group_by(WORKER.c.job_id, WORKER.c.device)):
        key = job_id, device_type(device)
        measured[key] = max(measured.get(key, 0), taken)
    found = {}
    for job in jobs:
        document = json.dumps(job.spec)
        for worker in (one for one in limited if job.queue in one.queues):
            kind = device_type(worker.device)
            taken = None if stored(job.spec).staging else measured.get((job.id, kind))  # other workers' stages differ
            room = worker.max_memory_bytes
            needed, stages = (taken, 0) if taken else _estimated(document, kind, room)
            why = does_not_fit(needed, room, bool(taken), by_flag=True, stages=stages)
            if why:
                found[job.id, worker.id] = f"{worker.name or worker.id} cannot take part: {why}"
    return found


@lru_cache(maxsize=4096)
def _estimated(document: str, device: str, room_bytes: int) -> tuple[int, int]:
    """Bytes that a seat needs at least, and the number of stages with which it would fit."""
    spec = JobSpec.model_validate_json(document)
    return seat_bytes(spec, device), stages_that_fit(spec, room_bytes, device)


def _tries(connection: Connection, now_ms: int) -> list[SeatTry]:
    """Seats for training, oldest first: ended within `TRIED_MS`, or the last seat with which a worker joined."""
    joined = (WORKER.c.job_id == SEAT.c.job_id) & (WORKER.c.worker == SEAT.c.worker) & (WORKER.c.seat == SEAT.c.id)
    query = select(SEAT.c.job_id, SEAT.c.worker, SEAT.c.state, WORKER.c.seat.is_not(None), SEAT.c.ended_ms)
    query = query.join(JOB, JOB.c.id == SEAT.c.job_id).outerjoin(WORKER, joined)
    query = query.where(JOB.c.status.in_(ACTIVE), (SEAT.c.ended_ms > now_ms - TRIED_MS) | WORKER.c.seat.is_not(None))
    query = query.where(SEAT.c.number != SCORING)
    return [SeatTry(*row) for row in connection.execute(query.order_by(SEAT.c.created_ms, SEAT.c.attempt))]


def _last_words(connection: Connection, pair: Pair) -> str:
    """The error in a worker's last event of leaving a job with an error; at most 300 characters."""
    worker, reason = EVENT.data["worker"].as_string(), EVENT.data["reason"].as_string()
    query = select(reason).where(EVENT.job_id == pair[0], TELLING, EVENT.type == "left", worker == pair[1])
    said = connection.scalar(query.where(reason.startswith(FAILED)).order_by(EVENT.id.desc()).limit(1))
    if not said:
        return "its process ended without an error message; see the worker's log"
    kind, _, message = said.removeprefix(FAILED).partition(": ")
    return str(message if message and hasattr(errors, kind) else said.removeprefix(FAILED))[:300]
