"""The table of machines: workers seen, successions of processes on a machine, and workers drained or dismissed."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import structlog
from sqlalchemy import Connection, delete, func, insert, or_, select, update

from api.access.audit import AUDIT
from api.database import Database
from api.scheduler.bans import pass_on
from api.tables import WORKER, Invite, Machine, table
from computeshare.queue import WorkerInfo
from computeshare.types import machine_of

INVITE, MACHINE = table(Invite), table(Machine)
KEPT_MS = 30 * 24 * 3600 * 1000
"""A machine that was not seen for this long is forgotten."""
KEPT_OF_GUEST = 64
"""Of a machine at the gateway, which names its workers as it likes, so many that are gone are remembered."""
NOTED_MS = 30_000
"""How often the rows of online workers are refreshed."""
TALLY_MS = 300_000
HOUR_MS = 3_600_000
CLOCKS_MS = 60_000
"""How far the broker's clock, which dates the workers' heartbeats, may be behind the control plane's clock."""
DRAINED = "drained"
DISMISSED = "asked to leave for good"

log = structlog.get_logger()


def confined(connection: Connection, workers: Iterable[WorkerInfo]) -> list[WorkerInfo]:
    """The workers, those of machines at the gateway with at most their invite's queue, whatever they say of themselves;
    with none, once the invite was withdrawn.

    The gateway admits only workers whose ids begin with their invite's id.
    """
    queues: dict[str, set[str]] = {machine: set() for machine in admitted_machines(connection)}
    for row in connection.execute(select(INVITE.c.id, INVITE.c.queue).where(INVITE.c.gateway)):
        queues[row.id] = {row.queue}
    return [
        replace(worker, queues=tuple(queues[machine] & set(worker.queues)))
        if (machine := machine_of(worker.id)) in queues
        else worker
        for worker in workers
    ]


class Roll:
    """Keeps the table of machines in line with the online workers."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._there: dict[str, WorkerInfo] = {}
        self._noted = 0
        self._was_calm = True

    def call(self, workers: Sequence[WorkerInfo], now: int, calm: bool) -> dict[str, str]:
        """Record the online workers; returns the workers that are to get no seat, each as `DRAINED` or `DISMISSED`.

        Args:
            now: milliseconds by the control plane's clock.
            calm: whether no worker is taken for gone at present.
        """
        there = {worker.id: worker for worker in workers}
        changed = there.keys() != self._there.keys() or (self._was_calm and not calm)
        if changed or not 0 <= now - self._noted < NOTED_MS:
            with self._database.writing() as connection:
                self._note(connection, there, now, calm)
            self._noted, self._was_calm = now, calm
        self._there = there
        with self._database.engine.connect() as connection:
            special = MACHINE.c.drained_ms.is_not(None) | MACHINE.c.dismissed_ms.is_not(None)
            rows = connection.execute(select(MACHINE.c.worker, MACHINE.c.dismissed_ms).where(special)).all()
        return {row.worker: DISMISSED if row.dismissed_ms else DRAINED for row in rows}

    def _note(self, connection: Connection, there: Mapping[str, WorkerInfo], now: int, calm: bool) -> None:
        for worker in there.values():
            remember(connection, worker, now)
        for worker in (gone for gone in self._there.values() if gone.id not in there):
            mine = MACHINE.c.worker == worker.id
            connection.execute(update(MACHINE).where(mine).values(last_seen_ms=worker.last_seen_ms))
        _tally(connection, there, now)
        if calm:
            return
        admitted = admitted_machines(connection)
        rows = connection.execute(select(MACHINE).order_by(MACHINE.c.last_seen_ms.desc())).all()
        excess = surplus([row.worker for row in rows], there, admitted)
        connection.execute(delete(MACHINE).where(MACHINE.c.worker.in_(excess)))
        for gone, new in successions([row for row in rows if row.worker not in excess], there, admitted).items():
            _succeed(connection, gone, new)
        forgotten = (MACHINE.c.noted_ms < now - KEPT_MS) & MACHINE.c.worker.not_in(list(there))
        connection.execute(delete(MACHINE).where(forgotten))


def surplus(workers: Iterable[str], online: Collection[str], admitted: Collection[str]) -> set[str]:
    """Of the workers, newest first, those that are gone beyond the newest `KEPT_OF_GUEST` of each admitted machine.
    Pure.
    """
    seen, found = Counter[str](), set[str]()
    for worker in workers:
        machine = machine_of(worker)
        if worker not in online and machine in admitted:
            seen[machine] += 1
            if seen[machine] > KEPT_OF_GUEST:
                found.add(worker)
    return found


def admitted_machines(connection: Connection) -> set[str]:
    """The ids of all machines at the gateway, also of those whose invites were withdrawn since."""
    used = select(AUDIT.c.subject).where(AUDIT.c.action == "invite.use")
    return set(connection.scalars(select(INVITE.c.id).where(INVITE.c.gateway).union(used)))


def successions(rows: Sequence[Any], online: Collection[str], admitted: Collection[str] = ()) -> dict[str, str]:
    """Each gone process that has a successor, a later process of the same machine, with that successor. Pure.

    Processes are of one machine if they have the same host and name and, as far as either was `admitted` to the
    gateway, the same id of a machine: the rest is what they say of themselves. A process succeeds at most one other, so
    that two processes that ran side by side do not become one.
    """

    def origin(row: Any) -> tuple[str, str, str]:
        machine = machine_of(row.worker)
        return row.host, row.name, machine if machine in admitted else ""

    found: dict[str, str] = {}
    new = [row for row in rows if row.worker in online and row.first_seen_ms == row.began_ms]
    for gone in sorted((row for row in rows if row.worker not in online), key=lambda row: -int(row.last_seen_ms)):
        same = [row.worker for row in new if origin(row) == origin(gone)]
        later = [row.worker for row in new if row.worker in same and row.began_ms >= gone.last_seen_ms]
        if after := next((worker for worker in later if worker not in found.values()), None):
            found[gone.worker] = after
    return found


def remember(connection: Connection, worker: WorkerInfo, now: int) -> None:
    """Store an online worker's description of itself."""
    said = {name: getattr(worker, name) for name in ("name", "host", "device", "memory_bytes", "versions")}
    said |= {"queues": list(worker.queues), "last_seen_ms": worker.last_seen_ms, "noted_ms": now}
    if connection.execute(update(MACHINE).where(MACHINE.c.worker == worker.id).values(said)).rowcount:
        return
    at = {"first_seen_ms": worker.last_seen_ms, "began_ms": worker.last_seen_ms}
    row = {"worker": worker.id, **said, **at, "tallies": [[now, 0]], "person": _person_of_new(connection, worker)}
    connection.execute(insert(MACHINE).values(row))


def _person_of_new(connection: Connection, worker: WorkerInfo) -> str | None:
    """Whose a new process's machine is (see `Machine.person`): at the gateway as its invite says, else as its newest
    process has it since the invite, if there was one: a person may have been assigned.
    """
    invite = _invite_of(connection, worker)
    invited = None if invite is None else invite.person or ""
    if invite and invite.gateway:
        return invited
    same = (MACHINE.c.name == worker.name) & (MACHINE.c.host == worker.host)
    same &= MACHINE.c.began_ms >= (invite.used_ms if invite else 0)
    query = select(MACHINE.c.worker, MACHINE.c.person).where(same).order_by(MACHINE.c.last_seen_ms.desc())
    known = connection.execute(query).all()
    admitted = admitted_machines(connection) if known else set()
    if machine_of(worker.id) in admitted:
        return invited
    return next((row.person for row in known if machine_of(row.worker) not in admitted), invited)


def _invite_of(connection: Connection, worker: WorkerInfo) -> Any:
    """The invite by which a worker came; None: it came without one, or long ago."""
    by_id = INVITE.c.gateway & (INVITE.c.id == machine_of(worker.id))
    by_name = INVITE.c.gateway.is_(False) & (INVITE.c.worker == worker.name)
    by_name &= INVITE.c.used_ms < worker.last_seen_ms + CLOCKS_MS
    query = select(INVITE.c.person, INVITE.c.gateway, INVITE.c.used_ms).where(or_(by_id, by_name))
    return connection.execute(query.order_by(INVITE.c.gateway.desc(), INVITE.c.used_ms.desc()).limit(1)).first()


def samples_counted(connection: Connection) -> dict[str, int]:
    """The number of samples counted for each worker, over all stored jobs."""
    query = select(WORKER.c.worker, func.sum(WORKER.c.samples)).group_by(WORKER.c.worker)
    return {worker: int(samples) for worker, samples in connection.execute(query)}


def last_hour(tallies: Sequence[Sequence[int]], total: int, now: int) -> int:
    """The number of a worker's samples counted in the last hour, give or take a few minutes. Pure."""
    before = [samples for at, samples in tallies if at <= now - HOUR_MS] or [samples for _, samples in tallies[:1]]
    return max(0, total - (before[-1] if before else 0))


def _tally(connection: Connection, there: Collection[str], now: int) -> None:
    """Every `TALLY_MS`, store each worker's total of counted samples; only one tally older than an hour is kept."""
    rows = connection.execute(
        select(MACHINE.c.worker, MACHINE.c.tallies).where(MACHINE.c.worker.in_(list(there)))
    ).all()
    due = [row for row in rows if not row.tallies or now - row.tallies[-1][0] >= TALLY_MS]
    totals = samples_counted(connection) if due else {}
    for row in due:
        tallies = [*row.tallies, [now, totals.get(row.worker, 0)]]
        old = sum(at <= now - HOUR_MS for at, _ in tallies)
        values = {"tallies": tallies[max(0, old - 1) :]}
        connection.execute(update(MACHINE).where(MACHINE.c.worker == row.worker).values(values))


def _succeed(connection: Connection, gone: str, new: str) -> None:
    """Give a new process its predecessor's history, and that it is drained if it is. It is its person's already."""
    before = connection.execute(select(MACHINE).where(MACHINE.c.worker == gone)).one()
    drained = func.coalesce(MACHINE.c.drained_ms, before.drained_ms)
    values = {"first_seen_ms": before.first_seen_ms, "drained_ms": drained}
    connection.execute(update(MACHINE).where(MACHINE.c.worker == new).values(values))
    connection.execute(delete(MACHINE).where(MACHINE.c.worker == gone))
    pass_on(connection, gone, new)
    log.info("worker came again", before=gone, now=new, drained=before.drained_ms is not None)
