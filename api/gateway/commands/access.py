"""A machine's access: to its own workers, to the jobs in which they have seats, and to the bundles of such jobs.

The answers are in the broker, where the control plane writes seats; positive ones are kept for a while.
"""

import math
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from redis import Redis

from api.gateway.commands.policy import CommandNeeds
from computeshare.protocol.keys import JobKeys
from computeshare.protocol.round_store import published_jobs

FRESH_S = 1.0
"""Seconds for which an answer about a job is not asked for again."""
LEAVING_S = 60.0
"""Seconds for which a worker may still reach a job after its seat was last seen there, to leave it."""
PRESENT_S = 60.0
MOST_WORKERS, MOST_READERS = 16, 200
"""The most workers of one machine within `PRESENT_S` seconds, each of which gets a share of a job's rounds; and the
most processes that fetch bundles.
"""
REMEMBERED = 10_000
_SUFFIX = re.compile(r"[a-z0-9]{4,24}")


@dataclass(slots=True)
class _Job:
    """A machine's workers with a seat in a job, each with when it was last seen there."""

    seen: dict[str, float] = field(default_factory=dict)
    looked: float = -math.inf
    is_banned: bool = False
    round_bytes: int = 0
    """The most bytes that the updates of one of its rounds may take."""


class Access:
    """Answers for all machines of a gateway, from any thread. What is shared between threads is replaced, not changed.

    Args:
        broker: returns a client with the control plane's rights.
    """

    def __init__(self, broker: Callable[[], Redis], clock: Callable[[], float] = time.monotonic) -> None:
        self._broker, self._clock = broker, clock
        self._jobs: OrderedDict[tuple[str, str], _Job] = OrderedDict()
        self._bundles: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._present: OrderedDict[str, dict[str, float]] = OrderedDict()

    def known(self, machine: str, needs: CommandNeeds) -> bool:
        """Whether a command may pass by answers at hand, without asking the broker."""
        now, present = self._clock(), self._present.get(machine, {})
        jobs = [self._jobs.get((machine, job)) for job in needs.jobs]
        return (
            all(now - present.get(one, -math.inf) < PRESENT_S / 4 for one in needs.workers | needs.readers)
            and all(job and now - job.looked < FRESH_S and not _problem(job, needs, now) for job in jobs)
            and all(now - self._bundles.get((machine, one), -math.inf) < LEAVING_S for one in needs.digests)
        )

    def refusal(self, machine: str, needs: CommandNeeds) -> str | None:
        """Why a command with these needs is refused; None: it may pass. Asks the broker.

        Raises RedisError; ComputeShareError: no broker is known.
        """
        now = self._clock()
        for worker in needs.workers:
            if not is_own(machine, worker):
                return "it names a worker of another machine"
            if not self._is_counted(machine, worker, MOST_WORKERS, now):
                return f"this machine has {MOST_WORKERS} other workers already"
        if any(not self._is_counted(machine, reader, MOST_READERS, now) for reader in needs.readers):
            return f"this machine fetched by {MOST_READERS} processes within a minute: wait"
        for job_id in needs.jobs:
            job = _last(self._jobs, (machine, job_id), _Job)
            if now - job.looked >= FRESH_S or _problem(job, needs, now):
                self._look(machine, job_id, job, now)
            if problem := _problem(job, needs, now):
                return problem
        return next((why for digest in needs.digests if (why := self._bundle_refusal(machine, digest, now))), None)

    def round_bytes(self, machine: str) -> int:
        """The most bytes that the updates of a round may take, summed over a machine's jobs."""
        return sum(job.round_bytes for (one, _), job in list(self._jobs.items()) if one == machine and job.seen)

    def versions(self) -> bytes:
        """The part of the broker's `INFO server` that workers may see. Raises as `refusal`."""
        found: Any = self._broker().info("server")
        shown = ("redis_version", "valkey_version", "server_name")
        return b"# Server\r\n" + "".join(f"{name}:{found[name]}\r\n" for name in shown if name in found).encode()

    def _is_counted(self, machine: str, name: str, most: int, now: float) -> bool:
        """Whether a worker, or a process that fetches (`WORKER-...`), is one of those that the machine may have."""
        present = {one: at for one, at in _last(self._present, machine, dict).items() if now - at <= PRESENT_S}
        if name not in present and sum(("-" in one) == ("-" in name) for one in present) >= most:
            return False
        self._present[machine] = present | {name: now}
        return True

    def _look(self, machine: str, job_id: str, job: _Job, now: float) -> None:
        keys, redis = JobKeys(job_id), self._broker()
        found: Any = redis.hkeys(keys.seats())
        seated = [worker for one in found if is_own(machine, worker := one.decode(errors="replace"))]
        banned: Any = redis.hkeys(keys.banned())
        job.is_banned = any(is_own(machine, one.decode(errors="replace")) for one in banned)
        if job.is_banned:
            seated = []
        if seated:
            units, limit = (int(one or 0) for one in redis.hmget(keys.round(), "total", "limit"))
            job.round_bytes = units * limit
        leaving = {worker: at for worker, at in job.seen.items() if now - at <= LEAVING_S}
        job.seen = leaving | dict.fromkeys(seated, now)
        job.looked = now

    def _bundle_refusal(self, machine: str, digest: str, now: float) -> str | None:
        if now - self._bundles.get((machine, digest), -math.inf) < LEAVING_S:
            return None
        redis = self._broker()
        for job_id in published_jobs(redis):
            job = _last(self._jobs, (machine, job_id), _Job)
            self._look(machine, job_id, job, now)
            spec: Any = redis.get(JobKeys(job_id).spec()) if job.seen else None
            if spec and digest.encode() in spec:
                _last(self._bundles, (machine, digest), float)
                self._bundles[machine, digest] = now
                return None
        return "no job in which this machine has a seat names this bundle"


def is_own(machine: str, worker: str) -> bool:
    """Whether a worker's id is one that a machine may use: the machine's id, and 4 to 24 further characters."""
    return worker.startswith(machine) and _SUFFIX.fullmatch(worker, len(machine)) is not None


def _problem(job: _Job, needs: CommandNeeds, now: float) -> str | None:
    seated = {worker for worker, at in job.seen.items() if now - at <= LEAVING_S}
    if seated and needs.workers <= seated:
        return None
    if job.is_banned:
        return "this machine is banned from this job"
    return "the worker has no seat in this job"


def _last(kept: "OrderedDict[Any, Any]", key: Any, make: Callable[[], Any]) -> Any:
    """The value of a key, made if it is new; the keys that were not used for long are forgotten."""
    found = kept.setdefault(key, None)
    if found is None:
        found = kept[key] = make()
    kept.move_to_end(key)
    if len(kept) > REMEMBERED:
        kept.popitem(last=False)
    return found
