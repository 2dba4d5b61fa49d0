"""Invites: a link admits one worker, once, for a short while.

The database holds only the digest of the link's code. A worker exchanges the link for the right to use the gateway, by
a key of its own, until the invite is withdrawn or its access ends; or, if the owner has set one for this purpose, for
the broker's address. It keeps what it got.
"""

import contextlib
import hashlib
import ipaddress
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from redis import Redis
from redis.exceptions import RedisError
from sqlalchemy import ColumnElement, and_, func, or_, select, update

from api.access.audit import record
from api.access.caller import Caller
from api.access.tokens import DAY_MS
from api.database import Database, now_ms
from api.errors import Conflict, NotFound
from api.gateway import traffic
from api.scheduler.machines import CLOCKS_MS, INVITE, MACHINE
from api.schemas import Admission, InviteList, InvitePublic
from computeshare.errors import ComputeShareError
from computeshare.protocol.round_store import RoundStore, published_jobs
from computeshare.runtime.signatures import is_signed
from computeshare.transport.addresses import GATEWAY_PATH
from computeshare.types import MACHINE_CHARACTERS, plain

KEPT_MS = 24 * 3600 * 1000
"""How long an invite is stored after its expiry, and after the end of its machine's access."""
CODE_BYTES = 18
INVITED = Caller("an invited machine")
_SERVED = func.json_each(MACHINE.c.queues).table_valued("value")
_BEGUN = (MACHINE.c.name == INVITE.c.worker) & (MACHINE.c.began_ms > INVITE.c.used_ms - CLOCKS_MS)
_SERVES = select(_SERVED.c.value).where(_SERVED.c.value == INVITE.c.queue).exists()
_AT_GATEWAY = INVITE.c.gateway & (func.substr(MACHINE.c.worker, 1, MACHINE_CHARACTERS) == INVITE.c.id)
_HEARD = select(MACHINE.c.worker).where(or_(_AT_GATEWAY, and_(INVITE.c.gateway.is_(False), _BEGUN, _SERVES))).exists()
"""Whether a worker of this machine was heard of: at the gateway by its id, which cannot be chosen, whatever else it
says; else, a worker of this name that has begun to serve the queue since the invite was taken up.
"""


@dataclass(frozen=True, slots=True)
class Introduction:
    """A machine's description of itself: its name, public key, and the key's signature over the invite's code."""

    name: str
    public_key: str
    signature: str


class InviteService:
    """Makes, shows, withdraws and takes up invites."""

    def __init__(
        self,
        database: Database,
        broker_url: str | None = None,
        public_url: str | None = None,
        broker: Callable[[], Redis] | None = None,
        control_key: str | None = None,
    ) -> None:
        """Workers use the gateway at `public_url`, else at the address in their invite's link; with `broker_url` alone,
        they get this address of the broker. `broker` holds the gateways' counts. Machines are told `control_key`, the
        public key by which the control plane signs.
        """
        self._database, self.public_url, self._broker = database, public_url, broker
        self._broker_url = None if public_url else broker_url
        self._control_key = control_key
        self.fingerprint = self.key_pin = ""
        """SHA-256 of the certificate at `public_url` and, in base64, of its key, if only clients that are told it trust
        it.
        """

    def create(
        self, queue: str, minutes: int, days: int | None = None, person: str | None = None
    ) -> tuple[InvitePublic, str]:
        """A new invite, and its code. The code cannot be read again.

        Args:
            days: how long the machine may use the gateway from now on; None: until the invite is withdrawn.
            person: for whom it is: the machine's contributions count as theirs.
        Raises: Conflict: machines get the broker's address here, which does not expire.
        """
        if days and self._broker_url:
            raise Conflict(
                "with COMPUTESHARE_PUBLIC_REDIS_URL an invited machine gets the broker's address, which does not "
                "expire: unset it, or leave out the days"
            )
        code, now = secrets.token_urlsafe(CODE_BYTES), now_ms()
        row = {"id": secrets.token_hex(4), "digest": _digest(code), "queue": queue, "created_ms": now, "person": person}
        row |= {"expires_ms": now + 60_000 * minutes, "access_ends_ms": now + days * DAY_MS if days else None}
        useless = INVITE.c.gateway.is_(False) | (INVITE.c.access_ends_ms < now - KEPT_MS)
        with self._database.writing() as connection:
            connection.execute(INVITE.delete().where(INVITE.c.expires_ms < now - KEPT_MS, useless))
            connection.execute(INVITE.insert(), row)
            record(connection, "invite.create", str(row["id"]), queue=queue, minutes=minutes, days=days, person=person)
        return self.show(str(row["id"])), code

    def list(self) -> InviteList:
        """All stored invites, newest first, with the bytes of the machines that use the gateway."""
        found = _found(self._database)
        sums = traffic.sums(self._broker) if self._broker and any(one.gateway for one in found) else {}
        for one in found:
            one.bytes_up, one.bytes_down = sums.get(f"{one.id}:up", 0), sums.get(f"{one.id}:down", 0)
        return InviteList(items=found)

    def show(self, invite_id: str) -> InvitePublic:
        """One invite. Raises NotFound."""
        for invite in _found(self._database, INVITE.c.id == invite_id):
            return invite
        raise _no_invite(invite_id)

    def have_joined(self, queue: str) -> bool:
        """Whether a machine that joined by an invite has served this queue, and may still do so."""
        here = INVITE.c.access_ends_ms.is_(None) | (INVITE.c.access_ends_ms > now_ms())
        query = select(INVITE.c.id).where(INVITE.c.queue == queue, INVITE.c.used_ms.is_not(None), here, _HEARD)
        with self._database.read() as session:
            return session.execute(query.limit(1)).first() is not None

    def withdraw(self, invite_id: str) -> None:
        """Make an invite useless. Nothing counts any more that a machine sends which joined by it through the gateway,
        and its connections are cut within seconds; a machine that has the broker's address stays. Raises NotFound.
        """
        with self._database.writing() as connection:
            if not connection.execute(INVITE.delete().where(INVITE.c.id == invite_id)).rowcount:
                raise _no_invite(invite_id)
            record(connection, "invite.withdraw", invite_id)
        if self._broker:
            with contextlib.suppress(RedisError, ComputeShareError):  # an outage: the gateways will cut it
                redis = self._broker()
                for job_id in published_jobs(redis):
                    with contextlib.suppress(RedisError):  # for example out of memory
                        RoundStore(redis, job_id).expel(invite_id, "its invite was withdrawn")
            traffic.forget(self._broker, invite_id)

    def find(self, code: str) -> InvitePublic:
        """The invite of this code. Raises NotFound."""
        for invite in _found(self._database, INVITE.c.digest == _digest(code)):
            return invite
        raise NotFound("there is no such invite: ask for a new invite")

    def take_up(self, code: str, machine: Introduction, from_here: bool, address: str = "") -> Admission:
        """Admit a worker, once. A repeated call with the same key gets the same answer, in case the first was lost.

        Args:
            from_here: whether the worker runs on the control plane's machine.
            address: of that machine, for the audit log.
        Raises: NotFound; Conflict: the invite was used or has expired, the worker cannot reach the broker, or has not
            proved that it holds its key.
        """
        invite, url = self.find(code), self._broker_url
        if url and not from_here and is_local(url):
            raise Conflict(UNREACHABLE)
        if not is_signed(machine.public_key, machine.signature, "join", code, machine.public_key):
            raise Conflict("this machine sent no key: install the control plane's version of ComputeShare there")
        now, name = now_ms(), plain(machine.name)
        free = INVITE.c.used_ms.is_(None) | (INVITE.c.public_key == machine.public_key)
        mine = (INVITE.c.id == invite.id) & free & (INVITE.c.expires_ms > now)
        taken: dict[str, Any] = {"used_ms": func.coalesce(INVITE.c.used_ms, now), "worker": name}
        taken |= {"public_key": machine.public_key, "gateway": url is None}
        with self._database.writing() as connection:
            if not connection.execute(update(INVITE).where(mine).values(taken)).rowcount:
                why = "was already used" if invite.worker else "has expired"
                raise Conflict(f"this invite {why}: ask for a new invite")
            record(connection, "invite.use", invite.id, (INVITED, address), worker=name, queue=invite.queue)
        key = self._control_key
        if url:
            return Admission(redis_url=url, queue=invite.queue, control_key=key)
        return Admission(gateway=GATEWAY_PATH, machine=invite.id, queue=invite.queue, control_key=key)

    def replace_key(self, machine_id: str, public_key: str, signature: str, address: str = "") -> None:
        """Let a machine use another key from now on, and not the present one, by which the new one must be signed.

        A repeated call changes nothing. Raises NotFound: there is no such machine, or this is not its signature.
        """
        mine = (INVITE.c.id == machine_id) & INVITE.c.gateway
        mine &= INVITE.c.access_ends_ms.is_(None) | (INVITE.c.access_ends_ms > now_ms())
        with self._database.writing() as connection:
            row = connection.execute(select(INVITE.c.public_key, INVITE.c.worker).where(mine)).first()
            if row and row.public_key == public_key:
                return
            if not row or not is_signed(row.public_key or "", signature, "rotate", machine_id, public_key):
                raise NotFound("there is no such machine, or its key is another one: ask for a new invite")
            connection.execute(update(INVITE).where(mine).values(public_key=public_key))
            record(connection, "machine.key", machine_id, (INVITED, address), worker=row.worker)

    def note(self) -> str | None:
        """Warnings: other machines may not reach the broker, or may do everything there. None without any."""
        url = self._broker_url
        if not url:
            return None
        if is_local(url):
            return UNREACHABLE
        host = urlsplit(url).hostname or ""
        notes = [NEARBY.format(host=host)] if is_nearby(host) else []
        return "; ".join(notes + [UNCONFINED] * (urlsplit(url).username != "worker")) or None


UNREACHABLE = (
    "the broker's address in COMPUTESHARE_PUBLIC_REDIS_URL can be reached from its own machine only: unset it, so that "
    "machines use the gateway, or set it to an address that they can reach; then restart the control plane"
)
UNCONFINED = (
    "the address in COMPUTESHARE_PUBLIC_REDIS_URL is not that of the broker's user worker: a machine that gets it may "
    "do everything in the broker; make users (docs/security.md), or unset it, so that machines use the gateway"
)
NEARBY = (
    "other networks do not know the broker's name, {host}: set COMPUTESHARE_PUBLIC_REDIS_URL to an address that other "
    "machines can reach, and restart the control plane"
)


def is_local(url: str) -> bool:
    """Whether only programs on the broker's own machine can reach the broker at this address."""
    parts = urlsplit(url)
    host = parts.hostname or "localhost"
    if parts.scheme == "unix" or host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def is_nearby(host: str) -> bool:
    """Whether `host` is a bare name, known only within one network (of containers, for example), and no address."""
    return "." not in host and ":" not in host


def _digest(code: str) -> str:
    return hashlib.sha256(code.encode(errors="replace")).hexdigest()


def _no_invite(invite_id: str) -> NotFound:
    return NotFound(f"there is no invite {invite_id}", "computeshare workers invites")


def _found(database: Database, *which: ColumnElement[bool]) -> list[InvitePublic]:
    """Invites, newest first."""
    query = select(INVITE, _HEARD.label("heard")).where(*which).order_by(INVITE.c.created_ms.desc())
    with database.engine.connect() as connection:
        rows = connection.execute(query).all()
    return [_public(row, now_ms()) for row in rows]


def _public(row: Any, now: int) -> InvitePublic:
    waiting = "pending" if row.expires_ms > now else "expired"
    joined = "joined" if row.heard else "taken"
    if row.gateway and row.access_ends_ms is not None and row.access_ends_ms <= now:
        joined = "ended"
    return InvitePublic(
        id=row.id,
        queue=row.queue,
        status=waiting if row.used_ms is None else joined,
        worker=row.worker,
        gateway=row.gateway,
        created_at=row.created_ms,
        expires_at=row.expires_ms,
        access_ends_at=row.access_ends_ms,
        person=row.person,
    )
