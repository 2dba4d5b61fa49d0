"""Which jobs the broker knows, and which it is told of: those that could start, as far as its memory goes."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from redis import Redis
from redis.exceptions import ResponseError

from api.publication.admission import Memory, exhausted, may_fit, no_room
from api.publication.outbox import Courier
from api.tables import priority_of
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol import keys
from computeshare.protocol.keys import JobKeys
from computeshare.protocol.round_store import RoundStore


@dataclass(frozen=True, slots=True)
class Published:
    """What the broker says of a job; `no_room` why its memory does not let the job start or go on, if so."""

    known: bool
    status: str | None
    reducer: bool
    no_room: str | None = None


class Publisher:
    """Tells the broker of jobs, and takes them back."""

    def __init__(self, courier: Courier) -> None:
        self._courier = courier
        self._needed: dict[tuple[str, str], int] = {}

    def look(self, redis: Redis, jobs: Sequence[Any]) -> dict[str, Published]:
        """What the broker says of each job, and whether it has room for it."""
        found = look_up(redis, [job.id for job in jobs])
        memory, promised = Memory.of(redis), self._promised(jobs, found)
        full = exhausted(memory)
        for job in jobs:
            why = full if found[job.id].known else no_room(self._bytes(job), promised, memory)
            found[job.id] = replace(found[job.id], no_room=why)
        return found

    def publish(
        self, redis: Redis, jobs: Sequence[Any], found: dict[str, Published], ready: Collection[str]
    ) -> dict[str, str]:
        """Tell the broker of those jobs that are `ready` and unknown to it, as far as there is room, which `found` says
        after this; of higher priority first, then the oldest. Returns, by job, what the broker refused.
        """
        refused: dict[str, str] = {}
        new = [job for job in jobs if job.id in ready and not found[job.id].known]
        if not new:
            return refused
        memory, promised = Memory.of(redis), self._promised(jobs, found)
        for job in sorted(new, key=lambda job: -priority_of(job.spec)):
            if why := no_room(self._bytes(job), promised, memory):
                found[job.id] = replace(found[job.id], no_room=why)
                continue
            try:
                self._courier.publish(redis, job.id)
            except ResponseError as error:  # out of memory, for one
                refused[job.id] = str(error)
                continue
            promised += self._bytes(job)
            found[job.id] = replace(found[job.id], known=True)
        return refused

    def withdraw(
        self, redis: Redis, jobs: Sequence[Any], found: Mapping[str, Published], idle: Collection[str]
    ) -> None:
        """Take back the `idle` jobs that no worker has joined yet, if another waits for the memory promised to them."""
        memory = Memory.of(redis)
        if not any(found[job.id].no_room and may_fit(self._bytes(job), memory) for job in jobs):
            return
        for job in jobs:
            rounds = RoundStore(redis, job.id)
            begun = job.started_ms is not None or not found[job.id].known
            if job.id in idle and not begun and rounds.is_stored():
                rounds.reset()

    def _promised(self, jobs: Sequence[Any], found: Mapping[str, Published]) -> int:
        """Bytes that the jobs which the broker knows may take, all together."""
        return sum(self._bytes(job) for job in jobs if found[job.id].known)

    def _bytes(self, job: Any) -> int:
        """Bytes of the broker's memory that a job may take."""
        key = (job.id, str(job.spec["codec"]))  # which is chosen later, maybe; nothing else that matters changes
        if key not in self._needed:
            self._needed[key] = JobSpec.model_validate(job.spec).broker_bytes
        return self._needed[key]


def look_up(redis: Redis, job_ids: Sequence[str]) -> dict[str, Published]:
    """What the broker says of each job."""
    members: Any = redis.smembers(keys.JOBS)
    known = [job_id for job_id in job_ids if job_id.encode() in members]
    pipeline = redis.pipeline(transaction=False)
    for job_id in known:
        names = JobKeys(job_id)
        pipeline.exists(names.spec())
        pipeline.hget(names.round(), "status")
        pipeline.exists(names.reducer())
    answers = iter(pipeline.execute() if known else ())
    found = dict.fromkeys(job_ids, Published(known=False, status=None, reducer=False))
    for job_id, spec, status, reducer in zip(known, answers, answers, answers, strict=True):
        found[job_id] = Published(bool(spec), status.decode() if status else None, bool(reducer))
    return found
