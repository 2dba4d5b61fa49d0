"""Access to a job's rounds for the control plane: publish, pause, end, delete, and read their state."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import structlog
from redis import Redis

from computeshare.errors import DamagedRound
from computeshare.protocol.channel import pairs
from computeshare.protocol.keys import JOBS, JobKeys
from computeshare.protocol.scripts import Scripts
from computeshare.types import ENDED, JOB_ID, Token, machine_of

log = structlog.get_logger()

LINES_KEPT, LINE_BYTES_KEPT = 4000, 2_000_000
"""Approximate limits on log lines, and their bytes, that wait for the control plane; the oldest are dropped."""
STATUSES = ("running", "paused", "finished", *ENDED)
FIELDS = ["status", "token", "base", "first", "count", "carried", "needed", "closed", "opened", "doubted"]


@dataclass(frozen=True, slots=True)
class RoundState:
    """A job's current round, which starts from the version `token`.

    Its units are those `carried` from the round before and `count` units from number `first` on; `needed` of them make
    the next version, or, once `closed`, the units received so far.
    """

    status: str
    token: Token
    base: Token | None
    first: int
    count: int
    carried: tuple[int, ...] = ()
    needed: int = 0
    closed: bool = False
    opened_ms: int = 0
    """Milliseconds since the epoch, by the broker's clock."""
    doubted: Token | None = None
    """The version whose weights, as a worker found in two reads, do not match the token's digest: the current one or,
    in a job with a delay or an overlap, the one before.
    """

    @property
    def total(self) -> int:
        return len(self.carried) + self.count

    @property
    def units(self) -> list[int]:
        """Numbers of all units of the round, ascending."""
        return [*sorted(self.carried), *range(self.first, self.first + self.count)]

    @property
    def version(self) -> int:
        return self.token.version

    @classmethod
    def parse(cls, values: Any) -> "RoundState | None":
        """Parse the values of `FIELDS` in a round's hash; None if the hash does not exist. Raises DamagedRound."""
        if values[0] is None:
            return None
        try:
            return cls._parsed(values)
        except (ValueError, OverflowError) as error:
            raise DamagedRound(f"the round cannot be read: {error}") from error

    @classmethod
    def _parsed(cls, values: Any) -> "RoundState":
        status, token, base, first, count, carried, needed, closed, opened, doubted = (
            bytes(value or b"").decode() for value in values
        )
        if status not in STATUSES:
            raise ValueError(f"status {status[:100]!r}")
        return cls(
            status=status,
            token=Token.parse(token),
            base=Token.parse(base) if base else None,
            first=int(first),
            count=int(count),
            carried=numbers_in(carried),
            needed=int(needed),
            closed=bool(closed),
            opened_ms=int(opened or 0),
            doubted=Token.parse(doubted) if doubted and doubted in (token, base) else None,
        )


def published_jobs(redis: Redis) -> list[str]:
    """The ids of the jobs that reducers and evaluators look after, sorted.

    Removes and logs entries that are not job ids: anybody with access to the broker can write there, and an id becomes
    part of keys and folder names.
    """
    members: Any = redis.smembers(JOBS)
    named = {bytes(member): bytes(member).decode(errors="replace") for member in members}
    if wrong := [member for member, text in named.items() if not JOB_ID.fullmatch(text)]:
        redis.srem(JOBS, *wrong)
        log.warning("removed entries that are not job ids", key=JOBS, entries=[repr(one[:100]) for one in wrong[:10]])
    return sorted(text for member, text in named.items() if member not in wrong)


class RoundStore:
    """The control plane's access to the keys of one job."""

    def __init__(self, redis: Redis, job_id: str) -> None:
        self.redis = redis
        self.keys = JobKeys(job_id)
        self.job_id = job_id
        self.scripts = Scripts(redis)

    def publish(self, spec_json: str, origin: str = "", creator: str = "") -> None:
        """Publish the job for reducers to open. Idempotent.

        Args:
            origin: token of the checkpoint that a fork starts from.
            creator: the name of whoever created the job; empty: not known.
        """
        pipeline = self.redis.pipeline(transaction=True)
        pipeline.set(self.keys.spec(), spec_json)
        if origin:
            pipeline.set(self.keys.origin(), origin)
        if creator:
            pipeline.set(self.keys.creator(), creator)
        pipeline.sadd(JOBS, self.job_id)
        pipeline.execute()

    def spec(self) -> str | None:
        """The JobSpec as JSON, or None if the job is not (or no longer) published."""
        raw: Any = self.redis.get(self.keys.spec())
        return None if raw is None else bytes(raw).decode()

    def creator(self) -> str:
        """The name of whoever created the job; empty: it is not known."""
        raw: Any = self.redis.get(self.keys.creator())
        return "" if raw is None else bytes(raw).decode(errors="replace")

    def stages(self) -> str | None:
        """Where the model is split into stages, as JSON; None: no reducer has decided, or it is not to be split."""
        raw: Any = self.redis.get(self.keys.stages())
        return None if raw is None else bytes(raw).decode()

    def read(self) -> RoundState | None:
        """The current round, or None while the job is not open. Raises DamagedRound."""
        return RoundState.parse(self.redis.hmget(self.keys.round(), FIELDS))

    def status(self) -> str | None:
        """`running`, `paused`, `finished` (all rounds committed) or the status it ended with; None while not open."""
        raw: Any = self.redis.hget(self.keys.round(), "status")
        return None if raw is None else bytes(raw).decode()

    def pause(self) -> bool:
        """Pause the rounds: workers leave, accepted updates stay. False if the rounds are not running."""
        return bool(self.scripts.call("pause", self.keys))

    def resume(self) -> bool:
        """Resume paused rounds; False if they are not paused."""
        return bool(self.scripts.call("resume", self.keys))

    def end(self, status: Literal["completed", "failed", "cancelled"]) -> None:
        """Stop the job's rounds for good: workers leave, and the reducer gives up its claim."""
        self.scripts.call("finish", self.keys, status=status)
        self.redis.srem(JOBS, self.job_id)

    def remove_worker(self, worker_id: str, reason: str) -> None:
        """End the session of a dead worker and free its leases."""
        leave(self.scripts, self.keys, worker_id, "*", reason)

    def expel(self, machine: str, reason: str) -> None:
        """End the sessions of all workers of a machine, free their leases, and take their seats away: nothing that they
        send from now on counts.
        """
        known: list[Any] = [*self.redis.hkeys(self.keys.seats()), *self.redis.hkeys(self.keys.sessions())]
        for worker in {one.decode(errors="replace") for one in known}:
            if machine_of(worker) == machine:
                self.redis.hdel(self.keys.seats(), worker)  # first: else it could join again
                self.remove_worker(worker, reason)

    def lift_ban(self, worker_id: str) -> bool:
        """Let a banned worker join again, its strikes forgotten; False if it was not banned."""
        return bool(self.scripts.call("pardon", self.keys, worker=worker_id))

    def append(self, kind: str, event: dict[str, Any], fence: str = "") -> bool:
        """Append an event if the job is still published and `fence`, if given, is the newest; else return False."""
        return bool(self.scripts.call("announce", self.keys, fence=fence, kind=kind, event=json.dumps(event)))

    def log(self, lines: Sequence[str]) -> bool:
        """Append lines (JSON) to the job's log; False if the job is no longer published."""
        return bool(self.scripts.call("log", self.keys, kept=LINES_KEPT, kept_bytes=LINE_BYTES_KEPT, lines=lines))

    def take(self, position: str, most: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """At most `most` events after the id `position`, oldest first, from backlog and stream, marked as taken."""
        found = self.scripts.call("take", self.keys, position=position, most=most)
        return [(stream_id, dict(pairs(fields))) for stream_id, fields in found]

    def is_stored(self) -> bool:
        """Whether the control plane has stored all events and log lines written so far."""
        return not any(map(self.redis.xlen, (self.keys.events(), self.keys.backlog(), self.keys.logs())))

    def reset(self) -> None:
        """Delete every key of the job except the fence, which locks out the previous reducer, and the seats, so that
        their workers may join again.
        """
        self.purge(keep=(self.keys.fence(), self.keys.seats()))

    def purge(self, keep: Iterable[str] = ()) -> None:
        """Delete every key of the job except `keep`. Deletes the spec first, so that no script recreates a key."""
        self.redis.unlink(self.keys.spec(), self.keys.round())
        self.redis.srem(JOBS, self.job_id)
        for key in self.redis.scan_iter(self.keys.pattern(), count=1000):
            if bytes(key).decode() not in keep:
                self.redis.unlink(key)


def numbers_in(text: str) -> tuple[int, ...]:
    """Parse comma-separated numbers, as the scripts write them."""
    return tuple(map(int, text.split(","))) if text else ()


def numbers_text(numbers: Iterable[int]) -> str:
    """Format numbers separated by commas, as the scripts read them."""
    return ",".join(map(str, numbers))


def leave(scripts: Scripts, keys: JobKeys, worker_id: str, session: str, reason: str) -> int:
    """End a session; returns the number of micro-batches freed, or -1 if the session had ended already."""
    event = json.dumps({"worker": worker_id, "reason": reason})
    return int(scripts.call("leave", keys, worker=worker_id, session=session, event=event))
