"""A seat as an RQ job that can run only one function, and only where the control plane has signed it."""

import contextlib
import json
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import structlog
from redis import Redis
from redis.client import Pipeline
from rq import Queue
from rq.exceptions import DuplicateJobError, NoSuchJobError
from rq.job import Job
from rq.serializers import JSONSerializer

from computeshare.protocol.keys import JobKeys
from computeshare.queue.rq_keys import RqKeys
from computeshare.runtime.signatures import SigningKey, is_signed
from computeshare.types import JOB_ID

FUNCTION = "computeshare.worker.seat.seat.serve"
"""The only function a seat's RQ job may name, on both sides."""
SCORING = 0
"""The number of each scoring seat, of which a job may have many; seats that train count from 1."""
RECIPE_FAILED = "the recipe failed: "
"""Prefix of a worker's reason for leaving a job whose recipe's code failed in training."""
_FIELDS = frozenset(
    [
        "created_at",
        "data",
        "description",
        "ended_at",
        "enqueued_at",
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
SIGNATURE = "signature"
"""The entry of an RQ job's `meta` with the control plane's signature."""
log = structlog.get_logger()
_SEAT = re.compile(rf"([a-z0-9]{{8,32}})-({JOB_ID.pattern})-([0-9]{{1,4}})-([0-9]{{1,9}})")


@dataclass(frozen=True, slots=True)
class Seat:
    """One worker's participation in one job: the `attempt`-th attempt at seat `number`, or at scoring for `SCORING`."""

    worker: str
    job: str
    number: int
    attempt: int

    @property
    def id(self) -> str:
        return f"{self.worker}-{self.job}-{self.number}-{self.attempt}"

    @property
    def scores(self) -> bool:
        """Whether the worker scores checkpoints of the job, and does not train."""
        return self.number == SCORING

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

    worker = control_key = ""
    """The only worker whose seats are loaded, and the public key by which they must be signed; empty: any, none."""

    @classmethod
    def of(cls, worker: str, control_key: str) -> type[Self]:
        """A class that loads only the seats that the control plane with this key has handed to this worker.

        Args:
            control_key: empty: it is not known, so that seats cannot be checked.
        """
        return type(cls.__name__, (cls,), {"worker": worker, "control_key": control_key})

    def restore(self, raw_data: Any) -> Any:
        """Load a hash from Redis. Raises NoSuchJobError: the hash is no seat, or not signed; RQ then skips the job."""
        kept = {name: value for name, value in raw_data.items() if name.decode(errors="replace") in _FIELDS}
        data = kept.get(b"data", b"")
        if not _is_seat(data, self._id):
            raise NoSuchJobError(f"refused RQ job {self._id}: it does not call {FUNCTION} with its own seat")
        if not self._is_meant(raw_data):
            log.warning("refused a seat that the control plane of this worker has not signed for it", seat=self._id)
            raise NoSuchJobError(f"refused RQ job {self._id}: it is not signed for this worker")
        kept.pop(b"result", None)
        try:
            return super().restore(kept)
        except Exception as error:  # RQ raises many kinds for dates, numbers and names that are none
            raise NoSuchJobError(f"refused RQ job {self._id}: its fields cannot be read ({error})") from error

    def _is_meant(self, raw_data: Mapping[bytes, bytes]) -> bool:
        origin = raw_data.get(b"origin", b"").decode(errors="replace")
        if self.worker and origin != self.worker:
            return False
        signature = _signature(raw_data.get(b"meta", b""))
        return not self.control_key or is_signed(self.control_key, signature, "seat", *_signed(str(self._id), origin))


def _signed(seat_id: str, origin: str) -> tuple[Any, ...]:
    """The values that a seat's signature covers: the RQ job's id, queue, function and arguments."""
    return seat_id, origin, FUNCTION, [seat_id]


def _signature(meta: bytes) -> str:
    """The signature in an RQ job's `meta`; empty: there is none."""
    try:
        found = json.loads(meta[:_LARGEST])
    except (ValueError, RecursionError):
        return ""
    return str(found.get(SIGNATURE, "")) if isinstance(found, dict) else ""


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
    """Hands seats to workers, each through an RQ queue of its own; reports their state, stops and deletes them.

    Args:
        key: the control plane's, which signs seats; None: they are not signed.
    """

    def __init__(self, redis: Redis, key: SigningKey | None = None) -> None:
        self.redis, self._key = redis, key

    def enqueue(self, seat: Seat) -> None:
        """Hand a seat to its worker; repeating this changes nothing."""
        if not seat.scores:  # a scorer does not join the job
            self.redis.hset(JobKeys(seat.job).seats(), seat.worker, seat.id)
        signature = self._key.sign("seat", *_signed(seat.id, seat.worker)) if self._key else ""
        with contextlib.suppress(DuplicateJobError):  # handed over already
            self._queue(seat.worker).enqueue_call(
                FUNCTION,
                args=(seat.id,),
                job_id=seat.id,
                description=seat.id,
                meta={SIGNATURE: signature},
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
        self.redis.publish(RqKeys(seat.worker).channel(), payload)

    def vacate(self, seat: Seat) -> None:
        """Let a seat's worker join its job no more, unless it has another seat there by now."""
        key = JobKeys(seat.job).seats()

        def leave(pipeline: Pipeline) -> None:
            held: Any = pipeline.hget(key, seat.worker)
            pipeline.multi()
            if held == seat.id.encode():
                pipeline.hdel(key, seat.worker)

        self.redis.transaction(leave, key)

    def forget(self, seat: Seat) -> None:
        """Delete everything in Redis about a finished seat."""
        try:
            SeatJob.fetch(seat.id, connection=self.redis, serializer=JSONSerializer).delete()
        except NoSuchJobError:
            self._queue(seat.worker).remove(seat.id)
            self.redis.delete(SeatJob.key_for(seat.id))

    def _queue(self, worker_id: str) -> Queue:
        return Queue(worker_id, connection=self.redis, job_class=SeatJob, serializer=JSONSerializer)
