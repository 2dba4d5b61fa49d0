"""Reads the standing versions and the micro-batches each was made of, from which a job can be recomputed."""

from collections import defaultdict
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from api.jobs.service import find
from api.projection import archive
from api.schemas import VersionPage, VersionPublic
from api.tables import LedgerEntry, VersionRow, table

VERSION, LEDGER = table(VersionRow), table(LedgerEntry)


def versions(session: Session, job_id: str, since: int, limit: int) -> VersionPage:
    """A page of up to `limit` standing versions above `since`, ascending. Raises NotFound."""
    last = find(session, job_id).version
    numbers = range(since + 1, min(since + limit, last) + 1)
    packed, block = archive.standing(session.connection(), job_id, numbers.start, numbers.stop - 1)
    rows = {row.version: row for row in sorted(packed, key=lambda row: row.incarnation)}
    rows |= _rows(session, job_id, numbers)
    counted = _counted(session, job_id, [row.token for row in rows.values()])
    for part in block.ledger:
        if part["token"] == rows[part["version"]].token:
            entry = (part["micro_batch"], part["worker"], part["samples"], part["staleness"])
            counted.setdefault(part["version"], []).append(entry)
    items = []
    for number in numbers:
        row, parts = rows.get(number), sorted(counted.get(number, []))
        token, sha256, loss = (row.token, row.sha256, row.loss) if row else (None, None, None)
        late = [part[3] for part in parts]
        about = {"version": number, "token": token, "sha256": sha256, "loss": loss}
        items.append(VersionPublic(**about, counted=[part[:3] for part in parts], staleness=late if any(late) else []))
    return VersionPage(items=items, next_since=numbers[-1] if numbers and numbers[-1] < last else None)


def _rows(session: Session, job_id: str, numbers: range) -> dict[int, Any]:
    """The standing versions' rows by number; of two rows for a number, the row of the newer incarnation."""
    within = VERSION.c.version.between(numbers.start, numbers.stop - 1)
    query = select(VERSION).where(VERSION.c.job_id == job_id, within, VERSION.c.voided.is_(False))
    return {row.version: row for row in session.execute(query.order_by(VERSION.c.incarnation))}


def _counted(session: Session, job_id: str, tokens: list[str]) -> dict[int, list[tuple[int, str, int, int]]]:
    """The ledger's entries by version, as (micro-batch, worker, samples, staleness)."""
    columns = (LEDGER.c.version, LEDGER.c.micro_batch, LEDGER.c.worker, LEDGER.c.samples, LEDGER.c.staleness)
    mine = (LEDGER.c.job_id == job_id) & LEDGER.c.token.in_(tokens) & LEDGER.c.voided.is_(False)
    found = defaultdict(list)
    for version, *part in session.execute(select(*columns).where(mine)):
        found[version].append(tuple(part))
    return dict(found)
