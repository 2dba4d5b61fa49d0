"""The audit log: who changed what, written in the transaction of the change."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

from sqlalchemy import Connection, select
from sqlalchemy.orm import Session
from sqlmodel import col

from api.access.caller import Caller, current
from api.access.schemas import AuditEntry, AuditPage
from api.database import Database, now_ms
from api.jobs.cursors import next_cursor, page
from api.tables import AuditRow, table

AUDIT = table(AuditRow)
KEPT_MS = 90 * 24 * 3600 * 1000
"""How long an entry is kept."""
Action = Literal[
    "job.create",
    "job.fork",
    "job.edit",
    "job.pause",
    "job.resume",
    "job.retry",
    "job.cancel",
    "job.delete",
    "link.create",
    "link.revoke",
    "worker.unban",
    "worker.drain",
    "worker.undrain",
    "worker.remove",
    "worker.person",
    "invite.create",
    "invite.use",
    "invite.withdraw",
    "machine.key",
    "webhook.create",
    "webhook.edit",
    "webhook.delete",
    "webhook.test",
    "webhook.redeliver",
    "token.create",
    "token.revoke",
    "login",
    "bundle.create",
    "dataset.create",
    "dataset.delete",
    "recipe.create",
    "recipe.delete",
]
ACTIONS: tuple[Action, ...] = get_args(Action)


def record(
    connection: Connection | Session, action: Action, subject: str, by: tuple[Caller, str] | None = None, **detail: Any
) -> None:
    """Add an entry to the transaction of the change it tells; does nothing outside requests.

    Args:
        subject: the id of what was changed.
        by: who did it and from which address; default: the caller of the present request.
        detail: short facts, no secrets.
    """
    found = by or current.get()
    if found is None:
        return
    (caller, address), now = found, now_ms()
    connection.execute(AUDIT.delete().where(AUDIT.c.at_ms < now - KEPT_MS))
    about = {"actor": caller.name, "token_id": caller.id, "address": address}
    connection.execute(
        AUDIT.insert().values(
            at_ms=now,
            action=action,
            subject=subject,
            detail={name: value for name, value in detail.items() if value is not None},
            **about,
        )
    )


class AuditLog:
    """Reads the audit log, and adds entries on changes that are not in the database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, action: Action, subject: str, by: tuple[Caller, str] | None = None, **detail: Any) -> None:
        """As `record`, in a transaction of its own."""
        with self._database.writing() as connection:
            record(connection, action, subject, by, **detail)

    def list(
        self,
        actor: str | None = None,
        action: str | None = None,
        subject: str | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> AuditPage:
        """A page of the entries of at most `KEPT_MS`, newest first. Raises BadCursor."""
        query = select(AuditRow).where(col(AuditRow.at_ms) >= now_ms() - KEPT_MS).order_by(col(AuditRow.id).desc())
        for column, value in ((AuditRow.actor, actor), (AuditRow.action, action), (AuditRow.subject, subject)):
            query = query.where(col(column) == value) if value else query
        with self._database.read() as session:
            rows = page(session, query, (int,), cursor, limit)
            return AuditPage(items=[_public(row[0]) for row in rows], next_cursor=next_cursor(rows))

    def actors(self) -> Sequence[str]:
        """The names of all who are in the log, in alphabetical order."""
        with self._database.engine.connect() as connection:
            names = connection.execute(select(AUDIT.c.actor).where(AUDIT.c.at_ms >= now_ms() - KEPT_MS).distinct())
            return sorted(row.actor for row in names)


def _public(row: AuditRow) -> AuditEntry:
    return AuditEntry(
        id=row.id,
        at=row.at_ms,
        actor=row.actor,
        token_id=row.token_id or None,
        address=row.address,
        action=row.action,
        subject=row.subject,
        detail=row.detail,
    )
