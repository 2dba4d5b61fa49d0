"""The workers that are online and the queues they serve, as the broker knows them now."""

from collections import Counter

from sqlalchemy import func, select
from sqlmodel import col

from api.broker import Broker
from api.database import Database
from api.schemas import QueueList, QueuePublic, WorkerList, WorkerPublic
from api.tables import Job, WorkerStat
from computeshare.queue import Seat, WorkerInfo, list_workers
from computeshare.types import ENDED


class Fleet:
    """Reading about workers. Every method raises RedisError or SettingsError while the broker is away."""

    def __init__(self, database: Database, broker: Broker) -> None:
        self._database, self._broker = database, broker

    def workers(self) -> WorkerList:
        """Those online, by name."""
        found = sorted(list_workers(self._broker.client()), key=lambda worker: (worker.name, worker.id))
        rate = func.sum(col(WorkerStat.samples_per_s))
        query = select(col(WorkerStat.worker), rate).where(col(WorkerStat.left_ms).is_(None))
        with self._database.read() as session:
            rows = session.execute(query.group_by(col(WorkerStat.worker)))
            rates: dict[str, float] = {worker: value for worker, value in rows}  # noqa: C416 - rows are no pairs to mypy
        return WorkerList(items=[_public(worker, rates.get(worker.id, 0.0)) for worker in found])

    def queues(self) -> QueueList:
        """Those that have workers or jobs that have not ended."""
        serving = Counter(queue for worker in list_workers(self._broker.client()) for queue in set(worker.queues))
        query = select(col(Job.queue), col(Job.status), func.count()).where(col(Job.status).not_in(ENDED))
        with self._database.read() as session:
            rows = session.execute(query.group_by(col(Job.queue), col(Job.status)))
            jobs = {(queue, status): count for queue, status, count in rows}
        names = sorted(serving.keys() | {queue for queue, _ in jobs})
        return QueueList(
            items=[
                QueuePublic(
                    name=name,
                    workers=serving[name],
                    queued=jobs.get((name, "queued"), 0),
                    running=jobs.get((name, "running"), 0),
                )
                for name in names
            ]
        )


def _public(worker: WorkerInfo, samples_per_s: float) -> WorkerPublic:
    try:
        job_id = Seat.parse(worker.seat).job if worker.seat else None
    except ValueError:
        job_id = None
    return WorkerPublic(
        id=worker.id,
        name=worker.name,
        device=worker.device,
        queues=list(worker.queues),
        host=worker.host,
        pid=worker.pid,
        memory_bytes=worker.memory_bytes,
        versions=worker.versions,
        seat=worker.seat,
        job_id=job_id,
        samples_per_s=samples_per_s,
        refused=worker.refusal,
        last_seen=worker.last_seen_ms,
    )
