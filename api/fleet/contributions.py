"""What each machine has contributed to all jobs together."""

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import select
from sqlmodel import col

from api.database import Database
from api.schemas import Contribution, ContributionList
from api.tables import TELLING, WORKER, Event

FRESH_S = 60.0
"""How old the figures may be: they are of all events of all jobs."""
PRESENCE = ("joined", "left", "banned")
HOUR_MS = 3_600_000


@dataclass(slots=True)
class _Machine:
    """The sums of a machine, which is known by its name: its workers have new ids after each start."""

    samples: int = 0
    present_ms: int = 0
    last_ms: int = 0
    device: str = ""
    jobs: set[str] = field(default_factory=set)


class Contributions:
    """Sums the workers' parts in all jobs that were not deleted."""

    def __init__(self, database: Database, fresh_s: float = FRESH_S) -> None:
        self._database, self._fresh_s = database, fresh_s
        self._known, self._due = ContributionList(items=[]), 0.0

    def list(self) -> ContributionList:
        """The machines whose samples counted, most samples first; the figures are a minute old at most."""
        if time.monotonic() >= self._due:
            self._known = self._summed()
            self._due = time.monotonic() + self._fresh_s
        return self._known

    def _summed(self) -> ContributionList:
        event = (col(Event.job_id), col(Event.type), col(Event.at_ms), col(Event.data))
        ordered = (
            select(*event).where(col(Event.type).in_(PRESENCE), TELLING).order_by(col(Event.job_id), col(Event.id))
        )
        stat = [WORKER.c[name] for name in ("job_id", "worker", "name", "device", "samples", "seen_ms", "left_ms")]
        with self._database.read() as session:
            stays = present(session.execute(ordered))
            rows = session.execute(select(*stat).where(WORKER.c.samples > 0)).all()
        machines: dict[str, _Machine] = defaultdict(_Machine)
        for row in rows:
            machine = machines[row.name or row.worker]
            before_ms, since = stays.get((row.job_id, row.worker), (0, None))
            until = max(row.left_ms or 0, row.seen_ms)
            machine.samples += row.samples
            machine.present_ms += before_ms + (max(0, until - since) if since is not None else 0)
            machine.jobs.add(row.job_id)
            if row.seen_ms >= machine.last_ms:
                machine.last_ms, machine.device = row.seen_ms, row.device
        total = sum(one.samples for one in machines.values())
        items = [_public(name, one, total) for name, one in machines.items()]
        return ContributionList(items=sorted(items, key=lambda one: (-one.samples, one.name)))


def present(events: Iterable[Any]) -> dict[tuple[str, str], tuple[int, int | None]]:
    """By job and worker: the milliseconds between its joining and its leaving, summed, and when it joined if it has not
    left since. `events`: those of `PRESENCE`, in order.
    """
    found: dict[tuple[str, str], tuple[int, int | None]] = {}
    for event in events:
        key = event.job_id, str(event.data.get("worker"))
        before_ms, since = found.get(key, (0, None))
        stayed_ms = max(0, event.at_ms - since) if since is not None else 0
        found[key] = (before_ms + stayed_ms, event.at_ms if event.type == "joined" else None)
    return found


def _public(name: str, machine: _Machine, total: int) -> Contribution:
    return Contribution(
        name=name,
        device=machine.device,
        samples=machine.samples,
        share=machine.samples / total,
        hours=round(machine.present_ms / HOUR_MS, 3),
        jobs=len(machine.jobs),
        last_seen=machine.last_ms,
    )
