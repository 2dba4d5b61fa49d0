"""Publishes in the broker the jobs that could start now, as far as the broker's memory allows."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from redis import Redis
from redis.exceptions import ResponseError

from api.publication.admission import BrokerMemory, exhausted, may_fit, no_room
from api.publication.outbox import Courier
from computeshare.protocol import keys
from computeshare.protocol.keys import JobKeys
from computeshare.protocol.round_store import RoundStore


@dataclass(frozen=True, slots=True)
class JobInBroker:
    """A job's state in the broker; `no_room` says why the broker's memory does not let the job start or go on."""

    known: bool
    status: str | None
    reducer: bool
    no_room: str | None = None


class Publisher:
    """Publishes jobs in the broker, and withdraws them."""

    def __init__(self, courier: Courier) -> None:
        self._courier = courier
        self._needed: dict[tuple[str, str], int] = {}
        """Bytes that each job may take, by job id and codec; of the jobs at the last `look` only."""

    def look(self, redis: Redis, jobs: Sequence[Any]) -> dict[str, JobInBroker]:
        """Each job's state in the broker, by id, `no_room` included."""
        found = broker_states(redis, [job.id for job in jobs])
        self._needed = {_key(job): self._bytes(job) for job in jobs}  # without the jobs that have ended
        memory, promised = BrokerMemory.of(redis), self._promised(jobs, found)
        full = exhausted(memory)
        for job in jobs:
            why = full if found[job.id].known else no_room(self._bytes(job), promised, memory)
            found[job.id] = replace(found[job.id], no_room=why)
        return found

    def publish(
        self, redis: Redis, jobs: Sequence[Any], found: dict[str, JobInBroker], ready: Collection[str]
    ) -> dict[str, str]:
        """Publish the `ready` jobs that the broker does not know, as far as it has room: higher priority first, then
        the oldest. Updates `found`; returns the broker's error by job where it refused the job.
        """
        refused: dict[str, str] = {}
        new = [job for job in jobs if job.id in ready and not found[job.id].known]
        if not new:
            return refused
        memory, promised = BrokerMemory.of(redis), self._promised(jobs, found)
        for job in sorted(new, key=lambda job: -job.spec.priority):
            if why := no_room(self._bytes(job), promised, memory):
                found[job.id] = replace(found[job.id], no_room=why)
                continue
            try:
                self._courier.publish(redis, job.id)
            except ResponseError as error:  # for example out of memory
                refused[job.id] = str(error)
                continue
            promised += self._bytes(job)
            found[job.id] = replace(found[job.id], known=True)
        return refused

    def withdraw(
        self, redis: Redis, jobs: Sequence[Any], found: Mapping[str, JobInBroker], idle: Collection[str]
    ) -> None:
        """Withdraw the `idle` jobs that no worker has joined yet, if another job waits for their memory."""
        memory = BrokerMemory.of(redis)
        if not any(found[job.id].no_room and may_fit(self._bytes(job), memory) for job in jobs):
            return
        for job in jobs:
            rounds = RoundStore(redis, job.id)
            begun = job.started_ms is not None or not found[job.id].known
            if job.id in idle and not begun and rounds.is_stored():
                rounds.reset()

    def _promised(self, jobs: Sequence[Any], found: Mapping[str, JobInBroker]) -> int:
        """Bytes that all published jobs may take together."""
        return sum(self._bytes(job) for job in jobs if found[job.id].known)

    def _bytes(self, job: Any) -> int:
        """Bytes of the broker's memory that a job may take."""
        known = self._needed.get(_key(job))
        return int(job.spec.broker_bytes if known is None else known)


def _key(job: Any) -> tuple[str, str]:
    """Identifies a job's size: its codec may be chosen later, no other field that the size depends on changes."""
    return job.id, str(job.spec.codec)


def broker_states(redis: Redis, job_ids: Sequence[str]) -> dict[str, JobInBroker]:
    """Each job's state in the broker, by id, without `no_room`."""
    members: Any = redis.smembers(keys.JOBS)
    known = [job_id for job_id in job_ids if job_id.encode() in members]
    pipeline = redis.pipeline(transaction=False)
    for job_id in known:
        names = JobKeys(job_id)
        pipeline.exists(names.spec())
        pipeline.hget(names.round(), "status")
        pipeline.exists(names.reducer())
    answers = iter(pipeline.execute() if known else ())
    found = dict.fromkeys(job_ids, JobInBroker(known=False, status=None, reducer=False))
    for job_id, spec, status, reducer in zip(known, answers, answers, answers, strict=True):
        found[job_id] = JobInBroker(bool(spec), status.decode() if status else None, bool(reducer))
    return found
