"""The machines that may use the gateway, and the broker's user for each.

A machine's credential is the id of the invite that it took up, and the secret with which it did so.
"""

import hashlib
import hmac
from collections.abc import Callable, Collection
from dataclasses import dataclass

from sqlalchemy import select

from api.database import Database
from api.tables import Invite, table

INVITE = table(Invite)


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine that has joined through the gateway."""

    id: str
    name: str


class Machines:
    """Reads the joined machines. Methods read the database.

    Args:
        broker_url: returns the control plane's own address of the broker, or raises SettingsError.
    """

    def __init__(self, database: Database, broker_url: Callable[[], str]) -> None:
        self._database, self._broker_url = database, broker_url

    def find(self, credential: str) -> Machine | None:
        """The machine with this credential, `ID.SECRET`; None: it is wrong, or was revoked."""
        machine_id, _, secret = credential.partition(".")
        query = select(INVITE.c.id, INVITE.c.worker, INVITE.c.key).where(INVITE.c.id == machine_id, INVITE.c.gateway)
        with self._database.engine.connect() as connection:
            row = connection.execute(query).first()
        given = hashlib.sha256(secret.encode(errors="replace")).hexdigest()
        if row is None or not hmac.compare_digest(row.key or "", given):
            return None
        return Machine(row.id, row.worker or "")

    def revoked(self, ids: Collection[str]) -> set[str]:
        """Those of these machines that may not use the gateway any more."""
        query = select(INVITE.c.id).where(INVITE.c.id.in_(ids), INVITE.c.gateway)
        with self._database.engine.connect() as connection:
            return set(ids) - set(connection.execute(query).scalars())

    def broker_url(self, machine: Machine) -> str:
        """The broker's address, user and password for this machine's connections, which the gateway keeps to itself.

        All machines share the control plane's user: a user of its own for each machine belongs here.
        """
        return self._broker_url()
