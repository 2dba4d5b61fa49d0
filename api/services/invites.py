"""Inviting machines: a link that lets one worker in, once, for a short while.

Only its digest is stored. What the link is exchanged for is the broker's address, which the worker keeps.
"""

import hashlib
import ipaddress
import secrets
from collections.abc import Callable
from urllib.parse import urlsplit

from sqlalchemy import select, update
from sqlmodel import col

from api.database import Database, now_ms
from api.errors import Conflict, NotFound
from api.schemas import Admission, InviteList, InvitePublic
from api.tables import Invite, table

INVITE = table(Invite)
KEPT_MS = 24 * 3600 * 1000
"""How long an invite that was used, or has expired, is remembered."""
CODE_BYTES = 18


class Invites:
    """Making, showing and taking up invites."""

    def __init__(self, database: Database, broker_url: Callable[[], str]) -> None:
        """`broker_url` gives the broker's address as workers are to use it. Raises SettingsError."""
        self._database, self._broker_url = database, broker_url

    def create(self, queue: str, minutes: int) -> tuple[InvitePublic, str]:
        """A new invite, and its code, which nobody can read again."""
        code, now = secrets.token_urlsafe(CODE_BYTES), now_ms()
        with self._database.write() as session:
            session.execute(INVITE.delete().where(INVITE.c.expires_ms < now - KEPT_MS))
            row = Invite(id=secrets.token_hex(4), digest=_digest(code), queue=queue, created_ms=now, expires_ms=now)
            row.expires_ms += 60_000 * minutes
            session.add(row)
            session.flush()
            return _public(row, now), code

    def list(self) -> InviteList:
        """Those of the last day, newest first."""
        with self._database.read() as session:
            rows = session.scalars(select(Invite).order_by(col(Invite.created_ms).desc())).all()
        return InviteList(items=[_public(row, now_ms()) for row in rows])

    def show(self, invite_id: str) -> InvitePublic:
        """One invite. Raises NotFound."""
        with self._database.read() as session:
            row = session.get(Invite, invite_id)
        if row is None:
            raise NotFound(f"there is no invite {invite_id}")
        return _public(row, now_ms())

    def withdraw(self, invite_id: str) -> None:
        """Make an invite useless; a worker that took it up stays. Raises NotFound."""
        with self._database.writing() as connection:
            if not connection.execute(INVITE.delete().where(INVITE.c.id == invite_id)).rowcount:
                raise NotFound(f"there is no invite {invite_id}")

    def find(self, code: str) -> InvitePublic:
        """The invite that this code belongs to. Raises NotFound."""
        with self._database.read() as session:
            row = session.scalar(select(Invite).where(col(Invite.digest) == _digest(code)))
        if row is None:
            raise NotFound("there is no such invite: ask for a new one on the job's page")
        return _public(row, now_ms())

    def take_up(self, code: str, name: str, from_here: bool) -> Admission:
        """Let a worker in, once.

        Args:
            name: what the worker's machine is called.
            from_here: whether it runs on the control plane's machine.
        Raises: NotFound; Conflict: it was used, has expired, or the broker cannot be reached from there.
        """
        invite, url = self.find(code), self._broker_url()
        if not from_here and is_local(url):
            raise Conflict(UNREACHABLE)
        now = now_ms()
        mine = (INVITE.c.id == invite.id) & INVITE.c.used_ms.is_(None) & (INVITE.c.expires_ms > now)
        with self._database.writing() as connection:
            taken = connection.execute(update(INVITE).where(mine).values(used_ms=now, worker=name)).rowcount
        if not taken:
            why = "was used already" if invite.status == "joined" else "has expired"
            raise Conflict(f"this invite {why}: ask for a new one on the job's page")
        return Admission(redis_url=url, queue=invite.queue)

    def note(self) -> str | None:
        """What a user should know before inviting another machine."""
        return UNREACHABLE if is_local(self._broker_url()) else None


UNREACHABLE = (
    "the broker of this control plane listens on its own machine only: run a Valkey or Redis that other machines can "
    "reach, set COMPUTESHARE_REDIS_URL to it, and start computeshare up again"
)


def is_local(url: str) -> bool:
    """Whether only programs on the same machine can reach a broker of this address."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return True
    try:
        return parts.hostname == "localhost" or ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return False


def _digest(code: str) -> str:
    return hashlib.sha256(code.encode(errors="replace")).hexdigest()


def _public(row: Invite, now: int) -> InvitePublic:
    status = "joined" if row.used_ms is not None else "pending" if row.expires_ms > now else "expired"
    return InvitePublic(
        id=row.id,
        queue=row.queue,
        status=status,
        worker=row.worker,
        created_at=row.created_ms,
        expires_at=row.expires_ms,
    )
