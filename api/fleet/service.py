"""Workers (online and offline), users' decisions about workers, and queues."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, select, update
from sqlalchemy.orm import Session
from sqlmodel import col

from api.access.audit import Action, record
from api.broker import Broker
from api.database import Database, now_ms
from api.errors import Conflict, NotFound
from api.fleet.people import OWNER, assign, shown
from api.gateway import traffic
from api.scheduler.eligibility import excluded
from api.scheduler.machines import MACHINE, last_hour, remember, samples_counted
from api.scheduler.seat_writer import seats_wanted
from api.schemas import PowerPublic, QueuedJobPublic, QueueList, QueuePublic, WorkerList, WorkerPublic
from api.stored_specs import readable
from api.tables import ACTIVE, Invite, Job, Machine, SeatRow, WorkerStat
from computeshare.jobspec.spec import QUEUE_PATTERN
from computeshare.queue import Seat, WorkerInfo, list_workers
from computeshare.queue.seats import SCORING
from computeshare.types import ENDED, machine_of

NOTHING = (None, None)


class Fleet:
    """Workers and queues. Methods ask the broker for the online workers, and raise RedisError or SettingsError while
    the broker is away.
    """

    def __init__(
        self, database: Database, broker: Broker, wake: Callable[[], None] = lambda: None, owner: str = OWNER
    ) -> None:
        self._database, self._broker, self._wake, self._owner = database, broker, wake, owner

    def workers(self, offline: bool = False) -> WorkerList:
        """Online workers by name; with `offline`, then the other known workers, the last seen first."""
        there = sorted(list_workers(self._broker.client()), key=lambda worker: (worker.name, worker.id))
        rows, figures = self._known(there)
        items = [_online(worker, rows.get(worker.id), figures) for worker in there]
        if offline:
            items += [_offline(row, figures) for row in _gone(list(rows.values()), there)]
        return WorkerList(items=items)

    def drain(self, worker_id: str, drained: bool) -> WorkerPublic:
        """Stop giving a worker seats (it leaves its current seat after its work unit), or give it seats again.

        Raises: NotFound; Conflict: the worker was asked to leave for good.
        """
        action: Action = "worker.drain" if drained else "worker.undrain"
        return self._public(self._decide(worker_id, action, drained_ms=now_ms() if drained else None))

    def assign(self, worker_id: str, person: str | None) -> WorkerPublic:
        """Say whose a worker's machine is, also in what it has contributed so far.

        Args:
            person: None: the owner's; of a machine at the gateway, nobody's by name.
        Raises: NotFound.
        """
        with self._changing(worker_id) as (connection, row):
            assign(connection, row, person, self._owner)
            record(connection, "worker.person", worker_id, name=row.name, person=person)
            changed = connection.execute(select(MACHINE).where(MACHINE.c.worker == worker_id)).one()
        return self._public(changed)

    def remove(self, worker_id: str) -> None:
        """Ask an online worker to leave for good; forget an offline worker. Raises NotFound."""
        there = [worker.id for worker in list_workers(self._broker.client())]
        if worker_id in there:
            self._decide(worker_id, "worker.remove", again=True, dismissed_ms=now_ms())
            return
        mine = (MACHINE.c.worker == worker_id) & MACHINE.c.dismissed_ms.is_(None)
        with self._database.writing() as connection:
            if not connection.execute(MACHINE.delete().where(mine)).rowcount:
                raise _unknown(worker_id)
            record(connection, "worker.remove", worker_id, online=False)

    def queues(self) -> QueueList:
        """The queues that have workers, or jobs that have not ended."""
        named = (queue for worker in list_workers(self._broker.client()) for queue in set(worker.queues))
        serving = Counter(queue for queue in named if re.fullmatch(QUEUE_PATTERN, queue))
        with self._database.read() as session:
            jobs = list(session.scalars(select(Job).where(col(Job.status).not_in(ENDED))))
            held = _seats_held(session)
        by_queue: dict[str, list[Job]] = defaultdict(list)
        for job in sorted(jobs, key=lambda job: (-job.priority, job.created_ms, job.id)):
            by_queue[job.queue].append(job)
        return QueueList(
            items=[
                _queue(name, serving[name], by_queue[name], held) for name in sorted(serving.keys() | by_queue.keys())
            ]
        )

    def _known(self, there: Sequence[WorkerInfo]) -> tuple[dict[str, Machine], "_Figures"]:
        """The stored machines by worker id, and the figures of all workers; `there` holds the online workers."""
        with self._database.read() as session:
            rows = {row.worker: row for row in session.scalars(select(Machine))}
            sums = traffic.sums(self._broker.client)
            return rows, _Figures.of(session, list(rows.values()), there, sums, now_ms(), self._owner)

    def _public(self, row: Any) -> WorkerPublic:
        """The answer about the worker of a row."""
        there = next((one for one in list_workers(self._broker.client()) if one.id == row.worker), None)
        _, figures = self._known([there] if there else [])
        return _online(there, row, figures) if there else _offline(row, figures)

    @contextmanager
    def _changing(self, worker_id: str) -> Iterator[tuple[Connection, Any]]:
        """A transaction with a worker's row, which is added if the dispatcher has not yet. Raises NotFound."""
        with self._database.engine.connect() as connection:
            known = connection.execute(select(MACHINE).where(MACHINE.c.worker == worker_id)).one_or_none()
        new = None if known else next((w for w in list_workers(self._broker.client()) if w.id == worker_id), None)
        with self._database.writing() as connection:
            if new:
                remember(connection, new, now_ms())
            row = connection.execute(select(MACHINE).where(MACHINE.c.worker == worker_id)).one_or_none()
            if row is None:
                raise _unknown(worker_id)
            yield connection, row

    def _decide(self, worker_id: str, action: Action, again: bool = False, **values: int | None) -> Any:
        """Store a decision about a worker; returns its row.

        Args:
            action: for the audit log.
            again: whether the decision may be made about a worker that was asked to leave.
        """
        with self._changing(worker_id) as (connection, row):
            if row.dismissed_ms and not again:
                raise Conflict(f"worker {worker_id} is being removed: to keep it, restart it once it has stopped")
            values = {name: (value and getattr(row, name)) or value for name, value in values.items()}
            mine = update(MACHINE).where(MACHINE.c.worker == worker_id).values(values)
            changed = connection.execute(mine.returning(*MACHINE.c)).one()
            record(connection, action, worker_id, name=row.name)
        self._wake()
        return changed


@dataclass(frozen=True, slots=True)
class _Figures:
    """Figures of workers from the database: samples per second now, samples in the last hour, samples by job and worker
    and by job (of jobs that have not ended), the reasons why a worker gets no seat in a job, and the bytes that
    machines of a name have sent and received through gateways. `owner` is whose the machines are that joined without
    an invite.
    """

    rates: dict[str, float]
    hour: dict[str, int]
    counted: dict[tuple[str, str], int]
    by_job: dict[str, int]
    left_out: dict[str, list[str]]
    moved: dict[str, tuple[int, int]]
    owner: str

    @classmethod
    def of(
        cls,
        session: Session,
        machines: Sequence[Machine],
        there: Sequence[WorkerInfo],
        sums: Mapping[str, int],
        now: int,
        owner: str,
    ) -> "_Figures":
        rate = func.sum(col(WorkerStat.samples_per_s))
        query = select(col(WorkerStat.worker), rate).join(Job, col(Job.id) == col(WorkerStat.job_id))
        query = query.where(col(WorkerStat.left_ms).is_(None), col(Job.status) == "running")
        rates = {worker: float(value) for worker, value in session.execute(query.group_by(col(WorkerStat.worker)))}
        totals = samples_counted(session.connection())
        hour = {row.worker: last_hour(row.tallies, totals.get(row.worker, 0), now) for row in machines}
        parts = select(col(WorkerStat.job_id), col(WorkerStat.worker), col(WorkerStat.samples))
        parts = parts.join(Job, col(Job.id) == col(WorkerStat.job_id)).where(col(Job.status).not_in(ENDED))
        counted = {(job_id, worker): samples for job_id, worker, samples in session.execute(parts)}
        by_job: Counter[str] = Counter()
        for (job_id, _), samples in counted.items():
            by_job[job_id] += samples
        left_out: dict[str, list[str]] = defaultdict(list)
        out = excluded(session.connection(), there, now)
        for (job_id, worker), why in out.reasons.items():
            left_out[worker].append(f"Job {job_id}: {why}")
        return cls(rates, hour, counted, dict(by_job), left_out, _moved(session, sums), owner)

    def share(self, worker: str) -> float:
        return self.hour.get(worker, 0) / max(1, sum(self.hour.values()))

    def job_share(self, job_id: str | None, worker: str) -> float | None:
        return self.counted.get((job_id, worker), 0) / max(1, self.by_job.get(job_id, 0)) if job_id else None


def _moved(session: Session, sums: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Bytes sent and received through gateways, by the machine's id. `sums`: as `traffic.sums`."""
    ids = session.scalars(select(col(Invite.id)).where(col(Invite.gateway)))
    return {one: (sums.get(f"{one}:up", 0), sums.get(f"{one}:down", 0)) for one in ids}


def _gone(rows: Sequence[Machine], there: Sequence[WorkerInfo]) -> list[Machine]:
    """The offline machines that may come back, the last seen first; for each host and name only the last process."""
    online, seen = {worker.id for worker in there}, {(worker.host, worker.name) for worker in there}
    gone = [row for row in rows if row.worker not in online and not row.dismissed_ms]
    found = []
    for row in sorted(gone, key=lambda row: -row.last_seen_ms):
        if (row.host, row.name) not in seen:
            seen.add((row.host, row.name))
            found.append(row)
    return found


def _unknown(worker_id: str) -> NotFound:
    return NotFound(f"there is no worker {worker_id}: GET /v1/workers?offline=true lists those that were seen")


def _online(worker: WorkerInfo, row: Machine | None, figures: _Figures) -> WorkerPublic:
    try:
        job_id = Seat.parse(worker.seat).job if worker.seat else None
    except ValueError:
        job_id = None
    return WorkerPublic(
        id=worker.id,
        online=True,
        name=worker.name,
        device=worker.device,
        queues=list(worker.queues),
        host=worker.host,
        pid=worker.pid,
        memory_bytes=worker.memory_bytes,
        max_memory_bytes=worker.max_memory_bytes or None,
        labels=dict(worker.labels),
        recipes=list(worker.recipes),
        confinement=worker.confinement or None,
        packages=dict(worker.packages),
        versions=worker.versions,
        seat=worker.seat,
        job_id=job_id,
        job_share=figures.job_share(job_id, worker.id),
        share=figures.share(worker.id),
        samples_per_s=figures.rates.get(worker.id, 0.0),
        bytes_up=figures.moved.get(machine_of(worker.id), NOTHING)[0],
        bytes_down=figures.moved.get(machine_of(worker.id), NOTHING)[1],
        refused=worker.refusal,
        drained=bool(row and row.drained_ms),
        leaving=bool(row and row.dismissed_ms),
        resting=worker.resting or None,
        power=PowerPublic(plugged=worker.power.plugged, percent=worker.power.percent),
        left_out=figures.left_out.get(worker.id, []),
        first_seen=row.first_seen_ms if row else worker.last_seen_ms,
        last_seen=worker.last_seen_ms,
        person=shown(row.person if row else None, figures.owner),
    )


def _offline(row: Machine, figures: _Figures) -> WorkerPublic:
    return WorkerPublic(
        id=row.worker,
        online=False,
        name=row.name,
        device=row.device,
        queues=row.queues,
        host=row.host,
        pid=None,
        memory_bytes=row.memory_bytes,
        max_memory_bytes=None,
        labels={},
        recipes=[],
        confinement=None,
        packages={},
        versions=row.versions,
        seat=None,
        job_id=None,
        job_share=None,
        share=figures.share(row.worker),
        samples_per_s=0.0,
        bytes_up=figures.moved.get(machine_of(row.worker), NOTHING)[0],
        bytes_down=figures.moved.get(machine_of(row.worker), NOTHING)[1],
        refused=None,
        drained=row.drained_ms is not None,
        leaving=row.dismissed_ms is not None,
        resting=None,
        power=PowerPublic(plugged=None, percent=None),
        left_out=[],
        first_seen=row.first_seen_ms,
        last_seen=row.last_seen_ms,
        person=shown(row.person, figures.owner),
    )


def _seats_held(session: Session) -> dict[str, int]:
    """The number of seats that train each job, without the seats whose workers were asked to leave."""
    query = select(col(SeatRow.job_id), func.count())
    query = query.where(col(SeatRow.ended_ms).is_(None), col(SeatRow.leaving_ms).is_(None))
    query = query.where(col(SeatRow.number) != SCORING)
    rows = session.execute(query.group_by(col(SeatRow.job_id)))
    return {row[0]: row[1] for row in rows}


def _queue(name: str, workers: int, jobs: Collection[Job], held: dict[str, int]) -> QueuePublic:
    statuses = Counter(job.status for job in jobs)
    return QueuePublic(
        name=name,
        workers=workers,
        queued=statuses["queued"],
        running=statuses["running"],
        jobs=[
            QueuedJobPublic(
                id=job.id,
                title=job.title,
                status=job.status,
                priority=job.priority,
                wanted=0 if isinstance(spec := readable(job.spec), str) else seats_wanted(spec),
                held=held.get(job.id, 0),
            )
            for job in jobs
            if job.status in ACTIVE
        ],
    )
