"""Read-only links to one job each: create, list, revoke, find. Only digests of their codes are stored."""

import secrets
from collections.abc import Sequence

from sqlalchemy import ColumnElement, func, select

from api.access.audit import record
from api.access.caller import Caller, author
from api.access.schemas import LinkList, LinkPublic
from api.access.tokens import DAY_MS, digest
from api.access.use import is_held, is_valid, note_use
from api.database import Database, now_ms
from api.errors import Conflict, NotFound
from api.jobs.service import find as find_job
from api.tables import ShareLink, table

LINK = table(ShareLink)
MOST = 100
"""The most links of one job."""
CODE_BYTES = 18


class Links:
    """The links of all jobs. They end with their job. Methods raise NotFound where there is no such job."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, job_id: str, days: int | None) -> tuple[LinkPublic, str]:
        """A new link, and its code, which cannot be read again. Raises Conflict: there are `MOST` already."""
        code, now = secrets.token_urlsafe(CODE_BYTES), now_ms()
        row = {"id": secrets.token_hex(4), "job_id": job_id, "digest": digest(code), "created_ms": now}
        row |= {"created_by": author(), "expires_ms": now + days * DAY_MS if days else None}
        with self._database.write() as session:
            find_job(session, job_id)
            if (session.scalar(select(func.count()).where(LINK.c.job_id == job_id)) or 0) >= MOST:
                raise Conflict(f"there are already {MOST} links to job {job_id}, the maximum: revoke one first")
            session.execute(LINK.insert().values(row))
            record(session, "link.create", job_id, link=row["id"], days=days)
        return self._public(LINK.c.id == row["id"])[0], code

    def list(self, job_id: str) -> LinkList:
        """The links to a job, newest first."""
        with self._database.read() as session:
            find_job(session, job_id)
        return LinkList(items=self._public(LINK.c.job_id == job_id))

    def revoke(self, job_id: str, link_id: str) -> None:
        """Delete a link: nothing accepts it from now on, and open pages end. Raises NotFound."""
        with self._database.write() as session:
            find_job(session, job_id)
            mine = (LINK.c.job_id == job_id) & (LINK.c.id == link_id)
            if session.execute(LINK.delete().where(mine).returning(LINK.c.id)).one_or_none() is None:
                raise NotFound(f"job {job_id} has no link {link_id}")
            record(session, "link.revoke", job_id, link=link_id)

    def find(self, code: str) -> Caller | None:
        """The reader whom a link's code lets in, if the link has not expired."""
        with self._database.engine.connect() as connection:
            mine = (LINK.c.digest == digest(code)) & is_valid(LINK)
            row = connection.execute(select(LINK).where(mine)).one_or_none()
        if row is None:
            return None
        note_use(self._database, LINK, row)
        return Caller("a link", id=row.id, job_id=row.job_id)

    def holds(self, caller: Caller) -> bool:
        """Whether a reader's link has neither expired nor been revoked."""
        return is_held(self._database, LINK, caller.id)

    def _public(self, *which: ColumnElement[bool]) -> Sequence[LinkPublic]:
        query = select(LINK).where(*which).order_by(LINK.c.created_ms.desc(), LINK.c.id)
        with self._database.engine.connect() as connection:
            rows = connection.execute(query).all()
        return [
            LinkPublic(
                id=row.id,
                job_id=row.job_id,
                created_at=row.created_ms,
                created_by=row.created_by,
                expires_at=row.expires_ms,
                expired=row.expires_ms is not None and row.expires_ms <= now_ms(),
                used_at=row.used_ms,
            )
            for row in rows
        ]
