"""Moves the events of all jobs from Redis streams to SQLite: rows and the last stream id in one transaction; then trims
the streams.

Repeating any step changes nothing: a stored stream id is not stored again, whether it was trimmed or not.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog
from redis import Redis
from redis.exceptions import ResponseError
from sqlalchemy import Connection

from api.database import Database
from api.projection.broker_rollback import goes_back, rewind
from api.projection.checkpoint_restore import Restored, restore
from api.projection.events.handlers import apply
from api.projection.events.job_projection import JobProjection, JobState
from api.projection.events.parser import RawEntry, StreamEvent, read_event, stream_position, text_of, token_of
from api.projection.rates import JobRates
from api.projection.repeated_entries import without_stored, without_summarized
from api.projection.row_store import is_scored, load_job, save_job, store_changes
from computeshare.checkpoints.branch import Branch
from computeshare.checkpoints.store import Artifacts
from computeshare.protocol.keys import JobKeys
from computeshare.protocol.round_store import RoundStore
from computeshare.protocol.versions.ledger import Entry as SavedVersion
from computeshare.runtime.failpoints import failpoint
from computeshare.types import Token

BATCH = 1000
"""Events taken from one job's stream at a time."""
STREAM_CHECK_TURNS = 10
"""Turns between checks whether the broker lost a stream."""
RATE_TURNS = 5
"""Turns between updates of the stored rates."""

_MOVING = "SELECT id FROM job WHERE status = 'running' AND samples_per_s != 0"
_RATE = """UPDATE worker_stat SET samples_per_s = :rate
WHERE job_id = :job AND worker = :worker AND samples_per_s != :rate AND left_ms IS NULL"""

log = structlog.get_logger()


class Projector:
    """The only consumer of the event streams."""

    def __init__(self, database: Database, artifacts_dir: Path | None = None) -> None:
        """`artifacts_dir` is the folder of checkpoints; without it, versions lost with a broker are not recovered."""
        self._database = database
        self._artifacts_dir = artifacts_dir
        self._rates: dict[str, JobRates] = {}
        self._turn = 0
        self._broker = ""

    def step(self, redis: Redis) -> int:
        """Store the events since the last turn; returns their number."""
        positions = self._positions()
        if not positions:
            self._rates.clear()
            return 0
        self._turn += 1
        broker = _run_id(redis)
        if broker != self._broker:  # another, or started again: its streams may have gone back to any point
            positions = dict.fromkeys(positions, "0-0")
        elif self._turn % STREAM_CHECK_TURNS == 1:
            self._reset_lost_streams(redis, positions)
        changed = _jobs_with_entries(redis, positions)
        read = ((job_id, RoundStore(redis, job_id).take(positions[job_id], BATCH)) for job_id in changed)
        taken = {job_id: entries for job_id, entries in read if entries}
        events = sum(self._store_batch(redis, job_id, entries) for job_id, entries in taken.items())
        if taken:
            failpoint("before_trim")
            _trim(redis, taken)
        self._broker = broker
        if self._turn % RATE_TURNS == 0:
            self._store_rates(redis)
        return events

    def _positions(self) -> dict[str, str]:
        """The last stored stream id of each job whose stream may hold more."""
        return dict(self._database.peek("SELECT id, stream_id FROM job WHERE purged_ms IS NULL"))

    def _reset_lost_streams(self, redis: Redis, positions: dict[str, str]) -> None:
        """Read a stream from its start again if the broker lost (part of) it: its last id is below the stored id.

        New ids need not be above the old ones: they come from the clock of the broker's machine.
        """
        pipeline = redis.pipeline(transaction=False)
        for job_id in positions:
            pipeline.xinfo_stream(JobKeys(job_id).events())
        for (job_id, position), info in zip(list(positions.items()), pipeline.execute(False), strict=True):
            if isinstance(info, ResponseError):  # there is no stream
                continue
            if isinstance(info, Exception):
                raise info
            if stream_position(info["last-generated-id"].decode()) < stream_position(position):
                log.warning("the broker lost events", job=job_id, from_id=info["last-generated-id"].decode())
                positions[job_id] = "0-0"

    def _store_batch(self, redis: Redis, job_id: str, raw: Sequence[RawEntry]) -> int:
        """Store one job's batch; returns how many of its entries were new. Pauses the rounds of a job that an event has
        paused: the dispatcher would do so as well, but up to a second of rounds later.
        """
        rates = self._rates.setdefault(job_id, JobRates())
        try:
            with self._database.writing() as connection:
                state = load_job(connection, job_id)
                if state is None:
                    return 0  # deleted meanwhile
                was = state["status"]
                new = without_stored(connection, job_id, without_summarized(connection, state, raw))
                events = _parsed(job_id, new)
                for batch in _batches(state, events):
                    self._project(connection, state, rates, batch)
                state["stream_id"] = raw[-1][0].decode()
                save_job(connection, state)
                failpoint("in_projection")
        except BaseException:
            self._rates.pop(job_id, None)  # the rates may include samples that were rolled back
            raise
        if state["status"] == "paused" != was:
            RoundStore(redis, job_id).pause()
        return len(events)

    def _project(self, connection: Connection, state: JobState, rates: JobRates, events: Sequence[StreamEvent]) -> None:
        """Apply the events of a batch and store their rows; only the first event may undo earlier events."""
        was, projection = state["status"], JobProjection(state, rates)
        for event in events:
            if not self._is_borne_out(state.id, event):
                about = {"id": event.stream_id, "type": event.type}
                log.warning("event passed over: the disk does not bear it out", job=state.id, **about)
                continue
            if event.type == "version" and (token := _token(event)) and goes_back(state, token):
                rewind(connection, state, token, event.at_ms)
            try:
                apply(projection, event)
            except Exception as error:  # a damaged or hostile event may make the parser raise anything
                about = {"id": event.stream_id, "type": event.type, "error": repr(error)[:200]}
                log.warning("event passed over", job=state.id, **about)
                continue
            if event.type == "opened":
                self._restore(connection, state, Restored(Token.parse(event.data["token"]), event.at_ms))
            if event.type == "stopped":
                self._complete_early(connection, state, event)
        projection.finish(lambda: is_scored(connection, state, projection.changes))
        store_changes(connection, state, projection.changes, was)

    def _is_borne_out(self, job_id: str, event: StreamEvent) -> bool:
        """Whether the disk confirms an event, where it can: every client of the broker can write any event."""
        if self._artifacts_dir is None or event.type not in ("opened", "checkpoint", "stopped"):
            return True
        artifacts, token = Artifacts(self._artifacts_dir, job_id), _token(event)
        branch = artifacts.branch()
        if token is None or not branch.incarnation:  # nothing is on record yet
            return True
        if event.type in ("checkpoint", "stopped"):
            return branch.holds(token) and artifacts.has(token)
        newest = token.incarnation == branch.incarnation
        return token.incarnation < branch.incarnation or (newest and token.version == branch.start)

    def _restore(self, connection: Connection, state: JobState, restored: Restored) -> None:
        """Bring the rows in line with the version at which a job was opened, and with its checkpoints on disk."""
        branch, saved = Branch(), list[SavedVersion]()
        if self._artifacts_dir:
            artifacts = Artifacts(self._artifacts_dir, state.id)
            branch, saved = artifacts.branch(), artifacts.ledgers()
        if branch.incarnation < restored.token.incarnation:  # nothing is on record
            branch = Branch(restored.token.incarnation, {}, restored.token.version)
        restore(connection, state, restored, branch, saved)

    def _complete_early(self, connection: Connection, state: JobState, event: StreamEvent) -> None:
        """Complete a job with a version before its last: the disk's record and the rows end there."""
        token = Token.parse(event.data["token"])
        if self._artifacts_dir:
            artifacts = Artifacts(self._artifacts_dir, state.id)
            state["weights_sha256"] = artifacts.manifest(token).sha256
            token = Token(artifacts.next_incarnation(token), token.version, token.digest16)
        state["token"], state["incarnation"], state["version"] = str(token), token.incarnation, token.version
        self._restore(connection, state, Restored(token, event.at_ms))
        state["rounds_total"] = token.version
        state["status"], state["reason"] = "completed", f"Stopped early: {text_of(event.data['reason'])}"

    def _store_rates(self, redis: Redis) -> None:
        """Store the current rates, which fall without events. A job that is not running loses its rates."""
        now_ms = _now_ms(redis)
        with self._database.writing() as connection:
            moving = connection.exec_driver_sql(_MOVING).scalars()  # before this process started, perhaps
            for job_id in {*moving, *self._rates}:
                state = load_job(connection, job_id)
                if state is None or state["status"] != "running":
                    self._rates.pop(job_id, None)
                if state is None:
                    continue
                rates = self._rates.get(job_id, JobRates())
                rate = round(rates.job.value(now_ms), 1)
                if rate != state["samples_per_s"]:
                    state["samples_per_s"] = rate
                rows = [
                    {"job": job_id, "worker": worker, "rate": round(rate.value(now_ms), 1)}
                    for worker, rate in rates.workers.items()
                ]
                if rows:
                    connection.exec_driver_sql(_RATE, rows)
                save_job(connection, state)


def _batches(state: JobState, events: Sequence[StreamEvent]) -> Iterable[Sequence[StreamEvent]]:
    """Split before each event that undoes earlier events, which must be stored first: `opened`, `stopped`, and versions
    that go back.
    """
    start, newest = 0, state["version"]
    for index, event in enumerate(events):
        token = _token(event) if event.type in ("opened", "stopped", "version") else None
        if token is None:
            continue
        if index > start and (event.type != "version" or token.version <= newest):
            yield events[start:index]
            start = index
        newest = token.version
    yield events[start:]


def _token(event: StreamEvent) -> Token | None:
    try:
        return token_of(event.data["token"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _parsed(job_id: str, raw: Sequence[RawEntry]) -> list[StreamEvent]:
    events = []
    for stream_id, fields in raw:
        try:
            events.append(read_event(stream_id, fields))
        except Exception as error:  # a damaged or hostile event may make the parser raise anything
            log.warning("event passed over", job=job_id, id=stream_id.decode(), error=repr(error)[:200])
    return events


def _jobs_with_entries(redis: Redis, positions: dict[str, str]) -> list[str]:
    """The jobs with stream entries after their positions."""
    names: Any = {}
    owners = {}
    for job_id, position in positions.items():
        for name in (JobKeys(job_id).backlog(), JobKeys(job_id).events()):
            names[name], owners[name] = position, job_id
    reply: Any = redis.xread(names, count=1)
    return list(dict.fromkeys(owners[name.decode()] for name, _ in reply))


def _run_id(redis: Redis) -> str:
    """The id of the broker's process, new at each start."""
    info: Any = redis.info("server")
    return str(info["run_id"])


def _trim(redis: Redis, taken: Mapping[str, Sequence[RawEntry]]) -> None:
    """Trim the stored entries from the streams."""
    pipeline = redis.pipeline(transaction=False)
    for job_id, entries in taken.items():
        milliseconds, sequence = stream_position(entries[-1][0].decode())
        for name in (JobKeys(job_id).backlog(), JobKeys(job_id).events()):
            pipeline.xtrim(name, minid=f"{milliseconds}-{sequence + 1}", approximate=False)
    pipeline.execute()


def _now_ms(redis: Redis) -> int:
    """Milliseconds since the epoch by the broker's clock."""
    answer: Any = redis.time()
    return int(answer[0]) * 1000 + int(answer[1]) // 1000
