"""The contributions of each machine, and of each person, to all jobs together."""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import select
from sqlmodel import col

from api.database import Database
from api.fleet.people import OWNER, shown
from api.schemas import Contribution, ContributionList, PersonContribution
from api.tables import TELLING, WORKER, Event

FRESH_S = 60.0
"""How old the figures may be: they are of all events of all jobs."""
PRESENCE = ("joined", "left", "banned")
HOUR_MS = 3_600_000


@dataclass(slots=True)
class _Sums:
    """Sums over the work of a machine, or of all machines of a person."""

    samples: int = 0
    present_ms: int = 0
    last_ms: int = 0
    device: str = ""
    jobs: set[str] = field(default_factory=set)

    def add(self, other: "_Sums") -> None:
        self.samples += other.samples
        self.present_ms += other.present_ms
        self.jobs |= other.jobs
        if other.last_ms >= self.last_ms:
            self.last_ms, self.device = other.last_ms, other.device

    def public(self, total: int) -> dict[str, Any]:
        hours = round(self.present_ms / HOUR_MS, 3)
        told = {"samples": self.samples, "share": self.samples / total, "hours": hours}
        return told | {"jobs": len(self.jobs), "last_seen": self.last_ms}


class Contributions:
    """Sums the workers' parts in all jobs that were not deleted. A machine is known by its name and by whose it is: its
    workers have new ids after each start.
    """

    def __init__(self, database: Database, owner: str = OWNER, fresh_s: float = FRESH_S) -> None:
        """`owner`: whose the machines are that joined without an invite."""
        self._database, self._owner, self._fresh_s = database, owner, fresh_s
        self._known, self._due = ContributionList(items=[], people=[]), 0.0
        self._lock, self._changed, self._told = threading.Lock(), object(), object()

    def list(self) -> ContributionList:
        """The machines whose samples counted, most samples first, and their people; a minute old at most."""
        with self._lock:
            changed = self._changed  # `forget` may be called while the sum is under way
            if changed is not self._told or time.monotonic() >= self._due:
                self._known = self._summed()
                self._told, self._due = changed, time.monotonic() + self._fresh_s
            return self._known

    def forget(self) -> None:
        """Sum anew at the next call."""
        self._changed = object()

    def _summed(self) -> ContributionList:
        event = (col(Event.job_id), col(Event.type), col(Event.at_ms), col(Event.data))
        ordered = (
            select(*event).where(col(Event.type).in_(PRESENCE), TELLING).order_by(col(Event.job_id), col(Event.id))
        )
        names = ("job_id", "worker", "name", "device", "person", "samples", "seen_ms", "left_ms")
        with self._database.read() as session:
            stays = present(session.execute(ordered))
            rows = session.execute(select(*(WORKER.c[name] for name in names)).where(WORKER.c.samples > 0)).all()
        machines: dict[tuple[str | None, str], _Sums] = defaultdict(_Sums)
        people: dict[str | None, _Sums] = defaultdict(_Sums)
        for row in rows:
            before_ms, since = stays.get((row.job_id, row.worker), (0, None))
            until = max(row.left_ms or 0, row.seen_ms)
            present_ms = before_ms + (max(0, until - since) if since is not None else 0)
            person = shown(row.person, self._owner)
            part = _Sums(row.samples, present_ms, row.seen_ms, row.device, {row.job_id})
            machines[person, row.name or row.worker].add(part)
            people[person].add(part)
        total = sum(one.samples for one in people.values())
        owned = Counter(person for person, _ in machines)
        items = [
            Contribution(person=person, name=name, device=one.device, **one.public(total))
            for (person, name), one in machines.items()
        ]
        summed = [
            PersonContribution(person=person, machines=owned[person], **one.public(total))
            for person, one in people.items()
        ]
        items.sort(key=lambda one: (-one.samples, one.name, one.person or ""))
        return ContributionList(items=items, people=sorted(summed, key=lambda one: (-one.samples, one.person or "")))


def present(events: Iterable[Any]) -> dict[tuple[str, str], tuple[int, int | None]]:
    """Presence by (job, worker): the milliseconds of all stays that ended, and the start of the present stay, or None
    if the worker has left. `events`: those of `PRESENCE`, in order.
    """
    found: dict[tuple[str, str], tuple[int, int | None]] = {}
    for event in events:
        key = event.job_id, str(event.data.get("worker"))
        before_ms, since = found.get(key, (0, None))
        stayed_ms = max(0, event.at_ms - since) if since is not None else 0
        found[key] = (before_ms + stayed_ms, event.at_ms if event.type == "joined" else None)
    return found
