"""Moves the events of all jobs from Redis streams to SQLite: rows and the last stream id in one transaction; then trims
the streams.

Repeating any step changes nothing: a stored stream id is not stored again, whether it was trimmed or not.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import structlog
from redis import Redis
from redis.exceptions import ResponseError
from sqlalchemy import Connection

from api.database import Database
from api.projection.broker_rollback import goes_back, rewind
from api.projection.checkpoint_restore import Restored, restore
from api.projection.event_parser import Entry, read_entry, token_of
from api.projection.event_projection import Fold, JobState
from api.projection.projection_store import is_scored, load, save, store
from api.projection.rates import Rates
from computeshare.checkpoints.branch import Branch
from computeshare.checkpoints.store import Artifacts
from computeshare.protocol.keys import JobKeys
from computeshare.protocol.ledger import Entry as Saved
from computeshare.protocol.round_store import RoundStore
from computeshare.runtime.failpoints import failpoint
from computeshare.types import Token

BATCH = 1000
"""Events taken from one job's stream at a time."""
REWIND_TURNS = 10
"""Turns between checks whether the broker lost a stream."""
RATE_TURNS = 5
"""Turns between updates of the stored rates."""

_KNOWN = " UNION ALL ".join(
    f"SELECT stream_id, {kind}, {what} FROM {name} "
    "WHERE job_id = :job AND stream_id IN (SELECT value FROM json_each(:ids))"
    for name, kind, what in (
        ("submission", "'submission'", "nonce"),
        ("event", "type", "json_extract(data, '$.token')"),
    )
)
_MOVING = "SELECT id FROM job WHERE status = 'running' AND samples_per_s != 0"
_FOLDED = """SELECT json_extract(data, '$.first'), stream_id FROM event
WHERE job_id = :job AND stream_id >= :since AND type = 'folded'"""
_RATE = """UPDATE worker_stat SET samples_per_s = :rate
WHERE job_id = :job AND worker = :worker AND samples_per_s != :rate AND left_ms IS NULL"""

RawEntry = tuple[bytes, dict[bytes, bytes]]
log = structlog.get_logger()


class Projector:
    """The only consumer of the event streams."""

    def __init__(self, database: Database, artifacts_dir: Path | None = None) -> None:
        """`artifacts_dir` is the folder of checkpoints; without it, versions lost with a broker are not recovered."""
        self._database = database
        self._artifacts_dir = artifacts_dir
        self._rates: dict[str, Rates] = {}
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
        elif self._turn % REWIND_TURNS == 1:
            self._rewind(redis, positions)
        told = _told(redis, positions)
        read = ((job_id, RoundStore(redis, job_id).take(positions[job_id], BATCH)) for job_id in told)
        taken = {job_id: entries for job_id, entries in read if entries}
        events = sum(self._take(job_id, entries) for job_id, entries in taken.items())
        if taken:
            failpoint("before_trim")
            _trim(redis, taken)
        self._broker = broker
        if self._turn % RATE_TURNS == 0:
            self._measure(redis)
        return events

    def _positions(self) -> dict[str, str]:
        """The last stored stream id of each job whose stream may hold more."""
        return dict(self._database.peek("SELECT id, stream_id FROM job WHERE purged_ms IS NULL"))

    def _rewind(self, redis: Redis, positions: dict[str, str]) -> None:
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
            if _order(info["last-generated-id"].decode()) < _order(position):
                log.warning("the broker lost events", job=job_id, from_id=info["last-generated-id"].decode())
                positions[job_id] = "0-0"

    def _take(self, job_id: str, raw: Sequence[RawEntry]) -> int:
        """Store one job's batch; returns how many of its entries were new."""
        rates = self._rates.setdefault(job_id, Rates())
        try:
            with self._database.writing() as connection:
                state = load(connection, job_id)
                if state is None:
                    return 0  # deleted meanwhile
                new = _unknown(connection, job_id, _unfolded(connection, state, raw))
                entries = _readable(job_id, new)
                for batch in _batches(state, entries):
                    self._apply(connection, state, rates, batch)
                state["stream_id"] = raw[-1][0].decode()
                save(connection, state)
                failpoint("in_projection")
                return len(entries)
        except BaseException:
            self._rates.pop(job_id, None)  # the rates may include samples that were rolled back
            raise

    def _apply(self, connection: Connection, state: JobState, rates: Rates, entries: Sequence[Entry]) -> None:
        """Fold and store a batch; only its first event may undo earlier events."""
        was, fold = state["status"], Fold(state, rates)
        for entry in entries:
            if not self._is_backed(state.id, entry):
                about = {"id": entry.stream_id, "type": entry.type}
                log.warning("event passed over: the disk does not bear it out", job=state.id, **about)
                continue
            if entry.type == "version" and (token := _token(entry)) and goes_back(state, token):
                rewind(connection, state, token, entry.at_ms)
            try:
                fold.take(entry)
            except Exception as error:  # a damaged or hostile event may make the parser raise anything
                about = {"id": entry.stream_id, "type": entry.type, "error": repr(error)[:200]}
                log.warning("event passed over", job=state.id, **about)
                continue
            if entry.type == "opened":
                self._restore(connection, state, Restored(Token.parse(entry.data["token"]), entry.at_ms))
        fold.finish(lambda: is_scored(connection, state, fold.changes))
        store(connection, state, fold.changes, was)

    def _is_backed(self, job_id: str, entry: Entry) -> bool:
        """Whether the disk confirms an event, where it can: every client of the broker can write any event."""
        if self._artifacts_dir is None or entry.type not in ("opened", "checkpoint"):
            return True
        artifacts, token = Artifacts(self._artifacts_dir, job_id), _token(entry)
        branch = artifacts.branch()
        if token is None or not branch.incarnation:  # nothing is on record yet
            return True
        if entry.type == "checkpoint":
            return branch.holds(token) and artifacts.has(token)
        newest = token.incarnation == branch.incarnation
        return token.incarnation < branch.incarnation or (newest and token.version == branch.start)

    def _restore(self, connection: Connection, state: JobState, restored: Restored) -> None:
        """Bring the rows in line with the version at which a job was opened, and with its checkpoints on disk."""
        branch, saved = Branch(), list[Saved]()
        if self._artifacts_dir:
            artifacts = Artifacts(self._artifacts_dir, state.id)
            branch, saved = artifacts.branch(), artifacts.ledgers()
        if branch.incarnation < restored.token.incarnation:  # nothing is on record
            branch = Branch(restored.token.incarnation, {}, restored.token.version)
        restore(connection, state, restored, branch, saved)

    def _measure(self, redis: Redis) -> None:
        """Store the current rates, which fall without events. A job that is not running loses its rates."""
        now_ms = _now_ms(redis)
        with self._database.writing() as connection:
            moving = connection.exec_driver_sql(_MOVING).scalars()  # before this process started, perhaps
            for job_id in {*moving, *self._rates}:
                state = load(connection, job_id)
                if state is None or state["status"] != "running":
                    self._rates.pop(job_id, None)
                if state is None:
                    continue
                rates = self._rates.get(job_id, Rates())
                rate = round(rates.job.value(now_ms), 1)
                if rate != state["samples_per_s"]:
                    state["samples_per_s"] = rate
                rows = [
                    {"job": job_id, "worker": worker, "rate": round(rate.value(now_ms), 1)}
                    for worker, rate in rates.workers.items()
                ]
                if rows:
                    connection.exec_driver_sql(_RATE, rows)
                save(connection, state)


def _batches(state: JobState, entries: Sequence[Entry]) -> Iterable[Sequence[Entry]]:
    """Split before each event that undoes earlier events, which must be stored first: `opened`, and versions that go
    back.
    """
    start, newest = 0, state["version"]
    for index, entry in enumerate(entries):
        token = _token(entry) if entry.type in ("opened", "version") else None
        if token is None:
            continue
        if index > start and (entry.type == "opened" or token.version <= newest):
            yield entries[start:index]
            start = index
        newest = token.version
    yield entries[start:]


def _token(entry: Entry) -> Token | None:
    try:
        return token_of(entry.data["token"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _unknown(connection: Connection, job_id: str, raw: Sequence[RawEntry]) -> list[RawEntry]:
    """The entries that are not stored yet.

    A broker that lost entries and whose clock went back may issue their ids again: such an entry is recognized by its
    content, and is stored under an id of its own.
    """
    own = {stream_id: b"%s~%08x" % (stream_id, crc32(fields.get(b"data", b""))) for stream_id, fields in raw}
    ids = json.dumps([each.decode() for pair in own.items() for each in pair])
    rows = connection.exec_driver_sql(_KNOWN, {"job": job_id, "ids": ids})
    known = {stream_id.encode(): (kind, what) for stream_id, kind, what in rows}
    taken = []
    for stream_id, fields in raw:
        if stream_id not in known:
            taken.append((stream_id, fields))
        elif own[stream_id] not in known and _said(fields) not in (None, known[stream_id]):
            taken.append((own[stream_id], fields))
    return taken


def _unfolded(connection: Connection, state: JobState, raw: Sequence[RawEntry]) -> Sequence[RawEntry]:
    """The entries without submissions that a `folded` summary counted and that a broker rollback brought back."""
    if not state["folded"]:
        return raw
    since = raw[0][0].decode().partition("-")[0]  # milliseconds of as many digits as all others
    rows = connection.exec_driver_sql(_FOLDED, {"job": state.id, "since": since})
    ranges = [(_order(first), _order(last.partition("~")[0])) for first, last in rows]
    return [
        (stream_id, fields)
        for stream_id, fields in raw
        if fields.get(b"type") != b"submission"
        or not any(first <= _order(stream_id.decode()) <= last for first, last in ranges)
    ]


def _said(fields: dict[bytes, bytes]) -> tuple[str, str | None] | None:
    """An entry's type, and its nonce or token, which together tell entries of one id apart; None if unreadable."""
    try:
        kind, data = fields[b"type"].decode(), json.loads(fields[b"data"])
        return kind, data.get({"submission": "nonce", "version": "token"}.get(kind, ""))
    except (KeyError, ValueError, AttributeError):
        return None


def _readable(job_id: str, raw: Sequence[RawEntry]) -> list[Entry]:
    entries = []
    for stream_id, fields in raw:
        try:
            entries.append(read_entry(stream_id, fields))
        except Exception as error:  # a damaged or hostile event may make the parser raise anything
            log.warning("event passed over", job=job_id, id=stream_id.decode(), error=repr(error)[:200])
    return entries


def _told(redis: Redis, positions: dict[str, str]) -> list[str]:
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
        milliseconds, sequence = _order(entries[-1][0].decode())
        for name in (JobKeys(job_id).backlog(), JobKeys(job_id).events()):
            pipeline.xtrim(name, minid=f"{milliseconds}-{sequence + 1}", approximate=False)
    pipeline.execute()


def _now_ms(redis: Redis) -> int:
    """Milliseconds since the epoch by the broker's clock."""
    answer: Any = redis.time()
    return int(answer[0]) * 1000 + int(answer[1]) // 1000


def _order(stream_id: str) -> tuple[int, int]:
    milliseconds, sequence = stream_id.split("-")
    return int(milliseconds), int(sequence)
