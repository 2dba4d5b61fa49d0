"""The versions that stand and the micro-batches each was made of: what a job can be recomputed from."""

from collections import defaultdict
from typing import Any

from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

from api.schemas import VersionPage, VersionPublic
from api.services.jobs import find
from api.tables import CheckpointRow, LedgerEntry, VersionRow, table

VERSION, LEDGER, CHECKPOINT = table(VersionRow), table(LedgerEntry), table(CheckpointRow)


def versions(session: Session, job_id: str, since: int, limit: int) -> VersionPage:
    """Up to `limit` versions above `since`. Raises NotFound."""
    last = find(session, job_id).version
    numbers = range(since + 1, min(since + limit, last) + 1)
    rows = _rows(session, job_id, numbers)
    counted = _counted(session, job_id, LEDGER.c.token.in_([row.token for row in rows.values()]))
    if unrecorded := [number for number in numbers if number not in rows]:
        counted |= _counted(session, job_id, LEDGER.c.version.in_(unrecorded))
    digests = _digests(session, job_id, unrecorded)
    items = []
    for number in numbers:
        row, parts = rows.get(number), sorted(counted.get(number, []))
        token, sha256, loss = (row.token, row.sha256, row.loss) if row else (None, digests.get(number), None)
        items.append(VersionPublic(version=number, token=token, sha256=sha256, loss=loss, counted=parts))
    return VersionPage(items=items, next_since=numbers[-1] if numbers and numbers[-1] < last else None)


def _rows(session: Session, job_id: str, numbers: range) -> dict[int, Any]:
    """The versions' rows by number; of two that stand, that of the newer incarnation."""
    within = VERSION.c.version.between(numbers.start, numbers.stop - 1)
    query = select(VERSION).where(VERSION.c.job_id == job_id, within, VERSION.c.voided.is_(False))
    return {row.version: row for row in session.execute(query.order_by(VERSION.c.incarnation))}


def _counted(session: Session, job_id: str, which: ColumnElement[bool]) -> dict[int, list[tuple[int, str, int]]]:
    """The ledger's entries by version. (By token, the ledger's own key, it is read without a look at the rest.)"""
    columns = (LEDGER.c.version, LEDGER.c.micro_batch, LEDGER.c.worker, LEDGER.c.samples)
    query = select(*columns).where(LEDGER.c.job_id == job_id, which, LEDGER.c.voided.is_(False))
    found = defaultdict(list)
    for version, *part in session.execute(query):
        found[version].append(tuple(part))
    return dict(found)


def _digests(session: Session, job_id: str, numbers: list[int]) -> dict[int, str]:
    """The digests of those among these versions that have a checkpoint."""
    mine = (CHECKPOINT.c.job_id == job_id) & CHECKPOINT.c.version.in_(numbers) & CHECKPOINT.c.voided.is_(False)
    rows = session.execute(select(CHECKPOINT.c.version, CHECKPOINT.c.sha256).where(mine))
    return {row.version: row.sha256 for row in rows}
