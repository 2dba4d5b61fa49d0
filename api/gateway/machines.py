"""The machines that may use the gateway.

A machine is the invite that it took up, with the public key that it gave.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from sqlalchemy import select

from api.database import Database, now_ms
from api.tables import Invite, table

INVITE = table(Invite)


@dataclass(frozen=True, slots=True)
class JoinedMachine:
    """A machine that has joined through the gateway."""

    id: str
    name: str
    public_key: str


class Machines:
    """Reads the joined machines. Methods read the database.

    Args:
        broker_url: returns the broker's address for machines' connections, or raises SettingsError.
    """

    def __init__(self, database: Database, broker_url: Callable[[], str]) -> None:
        self._database, self._broker_url = database, broker_url

    def find(self, machine_id: str) -> JoinedMachine | None:
        """The machine with this id; None: there is none, or its access has ended."""
        return self._standing([machine_id]).get(machine_id)

    def refused(self, machines: Collection[JoinedMachine]) -> set[JoinedMachine]:
        """Those of these machines that were withdrawn, whose access has ended, or that have another key by now."""
        standing = self._standing([one.id for one in machines])
        return {one for one in machines if one.id not in standing or standing[one.id].public_key != one.public_key}

    def _standing(self, ids: Collection[str]) -> dict[str, JoinedMachine]:
        held = INVITE.c.access_ends_ms.is_(None) | (INVITE.c.access_ends_ms > now_ms())
        query = select(INVITE.c.id, INVITE.c.worker, INVITE.c.public_key)
        query = query.where(INVITE.c.id.in_(ids), INVITE.c.gateway, INVITE.c.public_key.is_not(None), held)
        with self._database.engine.connect() as connection:
            return {
                row.id: JoinedMachine(row.id, row.worker or "", row.public_key) for row in connection.execute(query)
            }

    def broker_url(self, machine: JoinedMachine) -> str:
        """The broker's address and password for this machine's connections, which the gateway keeps to itself: that of
        its user `worker` for all, since the gateway decides on each command (ADR 31).
        """
        return self._broker_url()
