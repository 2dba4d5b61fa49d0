"""Metrics for Prometheus: requests, jobs, speed, workers, pending outbox entries."""

from collections import Counter as Tally
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from redis.exceptions import RedisError
from sqlalchemy import func, select
from sqlmodel import col

from api.broker import Broker
from api.database import Database
from api.tables import Job, Outbox
from computeshare.errors import ComputeShareError
from computeshare.queue import list_workers


class Telemetry:
    """An application's metrics, in a Prometheus registry of its own."""

    def __init__(self, database: Database, broker: Broker) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        labels = ["method", "route", "status"]
        self.requests = Counter("computeshare_http_requests", "Requests answered", labels, registry=self.registry)
        self.seconds = Histogram(
            "computeshare_http_request_seconds", "Seconds until an answer began", ["route"], registry=self.registry
        )
        self.registry.register(_State(database, broker))


class _State(Collector):
    """Gauges read from the database and the broker at each scrape."""

    def __init__(self, database: Database, broker: Broker) -> None:
        self._database, self._broker = database, broker

    def describe(self) -> Iterable[Metric]:
        return []  # nothing is read at registration

    def collect(self) -> Iterable[Metric]:
        jobs = GaugeMetricFamily("computeshare_jobs", "Jobs by status", labels=["status"])
        speed = GaugeMetricFamily("computeshare_samples_per_second", "Samples a second, all running jobs")
        waiting = GaugeMetricFamily("computeshare_outbox_waiting", "Deliveries that are still to be made")
        with self._database.read() as session:
            rows = session.execute(select(col(Job.status), func.count()).group_by(col(Job.status)))
            for status, count in rows:
                jobs.add_metric([status], count)
            running = select(func.coalesce(func.sum(col(Job.samples_per_s)), 0)).where(col(Job.status) == "running")
            speed.add_metric([], session.execute(running).scalar_one())
            due = select(func.count()).where(col(Outbox.done_ms).is_(None))
            waiting.add_metric([], session.execute(due).scalar_one())
        yield from (jobs, speed, waiting)
        yield from self._workers()

    def _workers(self) -> Iterable[Metric]:
        up = GaugeMetricFamily("computeshare_broker_up", "Whether the broker answers")
        workers = GaugeMetricFamily("computeshare_workers", "Workers online by queue", labels=["queue"])
        try:
            online = list_workers(self._broker.client())
        except (RedisError, ComputeShareError):
            online = None
        up.add_metric([], float(online is not None))
        for queue, count in Tally(q for worker in online or () for q in set(worker.queues)).items():
            workers.add_metric([queue], count)
        yield from (up, workers)
