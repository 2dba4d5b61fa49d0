"""A seat as an RQ job that can run only one function."""

import contextlib
import json
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from redis import Redis
from rq import Queue
from rq.exceptions import DuplicateJobError, NoSuchJobError
from rq.job import Job
from rq.serializers import JSONSerializer

from computeshare.protocol.keys import JobKeys
from computeshare.types import JOB_ID

FUNCTION = "computeshare.worker.seat.seat.serve"
"""The only function a seat's RQ job may name, on both sides."""
RECIPE_FAILED = "the recipe failed: "
"""Prefix of a worker's reason for leaving a job whose recipe's code failed in training."""
_FIELDS = frozenset(
    [
        "created_at",
        "data",
        "description",
        "ended_at",
        "enqueued_at",
        "exc_info",
        "failure_ttl",
        "last_heartbeat",
        "origin",
        "result",
        "result_ttl",
        "started_at",
        "status",
        "timeout",
        "worker_name",
    ]
)
_LARGEST = 4096
_SEAT = re.compile(rf"([a-z0-9]{{8,32}})-({JOB_ID.pattern})-([0-9]{{1,4}})-([0-9]{{1,9}})")


@dataclass(frozen=True, slots=True)
class Seat:
    """One worker's participation in one job: the `attempt`-th attempt at seat `number`."""

    worker: str
    job: str
    number: int
    attempt: int

    @property
    def id(self) -> str:
        return f"{self.worker}-{self.job}-{self.number}-{self.attempt}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a seat's id. Raises ValueError."""
        match = _SEAT.fullmatch(text)
        if not match:
            raise ValueError(f"not a seat: {text[:100]!r}")
        worker, job, number, attempt = match.groups()
        return cls(worker, job, int(number), int(attempt))


class SeatJob(Job):
    """An RQ job that can only be a seat.

    Otherwise anyone who can write an RQ job's hash could make a worker import and call any function, run callbacks,
    send web requests or inflate a small hash to gigabytes. All fields but a seat's own are dropped here.
    """

    def restore(self, raw_data: Any) -> Any:
        """Load a hash from Redis. Raises NoSuchJobError: the hash is no seat; RQ then skips the job."""
        kept = {name: value for name, value in raw_data.items() if name.decode(errors="replace") in _FIELDS}
        data = kept.get(b"data", b"")
        if not _is_seat(data, self._id):
            raise NoSuchJobError(f"refused RQ job {self._id}: it does not call {FUNCTION} with its own seat")
        kept.pop(b"result", None)
        return super().restore(kept)


def _is_seat(data: bytes, job_id: str | None) -> bool:
    try:
        if len(data) > _LARGEST:
            return False
        text = zlib.decompressobj().decompress(data, _LARGEST)
        function, instance, arguments, named = json.loads(text)
        return function == FUNCTION and instance is None and arguments == [job_id] and named == {}
    except (zlib.error, ValueError, TypeError, RecursionError):
        return False


class SeatQueue:
    """Hands seats to workers, each through an RQ queue of its own; reports their state, stops and deletes them."""

    def __init__(self, redis: Redis) -> None:
        self.redis = redis

    def enqueue(self, seat: Seat) -> None:
        """Hand a seat to its worker; repeating this changes nothing."""
        self.redis.hset(JobKeys(seat.job).seats(), seat.worker, seat.id)
        with contextlib.suppress(DuplicateJobError):  # handed over already
            self._queue(seat.worker).enqueue_call(
                FUNCTION,
                args=(seat.id,),
                job_id=seat.id,
                description=seat.id,
                timeout=-1,
                result_ttl=300,
                failure_ttl=3600,
                unique=True,
            )

    def state(self, seats: Iterable[Seat]) -> dict[str, str]:
        """Seat id to `queued`, `started`, `finished`, `failed` or `missing` (the broker does not know it)."""
        ids = [seat.id for seat in seats]
        pipeline = self.redis.pipeline(transaction=False)
        for seat_id in ids:
            pipeline.hget(SeatJob.key_for(seat_id), "status")
        names = {b"queued": "queued", b"created": "queued", b"started": "started", b"finished": "finished"}
        statuses = pipeline.execute() if ids else []
        return {
            seat_id: "missing" if status is None else names.get(status, "failed")
            for seat_id, status in zip(ids, statuses, strict=True)
        }

    def stop(self, seat: Seat) -> None:
        """End a seat: dequeue it, or kill its process if it has started (order a graceful end first)."""
        self._queue(seat.worker).remove(seat.id)
        payload = json.dumps({"command": "stop-job", "job_id": seat.id})
        self.redis.publish(f"rq:pubsub:{seat.worker}", payload)

    def forget(self, seat: Seat) -> None:
        """Delete everything in Redis about a finished seat."""
        try:
            SeatJob.fetch(seat.id, connection=self.redis, serializer=JSONSerializer).delete()
        except NoSuchJobError:
            self._queue(seat.worker).remove(seat.id)
            self.redis.delete(SeatJob.key_for(seat.id))

    def _queue(self, worker_id: str) -> Queue:
        return Queue(worker_id, connection=self.redis, job_class=SeatJob, serializer=JSONSerializer)
