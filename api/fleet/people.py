"""Whose machines are. Stored is a name, or nothing: see `api.tables.Machine.person`."""

from typing import Any

from sqlalchemy import Connection, false, func, or_, update

from api.scheduler.machines import INVITE, MACHINE, admitted_machines
from api.tables import WORKER
from computeshare.types import MACHINE_CHARACTERS, machine_of

OWNER = "owner"


def shown(person: str | None, owner: str) -> str | None:
    """The name behind a stored `person`; None: the machine's invite named nobody."""
    return owner if person is None else person or None


def assign(connection: Connection, row: Any, person: str | None, owner: str) -> None:
    """Say whose the machine of a worker's row is: of all its workers, also in the jobs in which they took part.

    A machine at the gateway is known by the beginning of its workers' ids, another one by its name. No name is stored
    for the `owner` of the latter, so that it stays right when the owner's name changes.
    """
    machine, admitted = machine_of(row.worker), admitted_machines(connection)
    invited = machine in admitted
    stored = (person or "") if invited else (None if person == owner else person)
    for rows in (MACHINE, WORKER):
        named = (rows.c.name == row.name) & rows.c.person.is_not_distinct_from(row.person) if row.name else false()
        named &= func.substr(rows.c.worker, 1, MACHINE_CHARACTERS).not_in(sorted(admitted))
        alike = rows.c.worker.startswith(machine, autoescape=True) if invited else named
        connection.execute(update(rows).where(or_(rows.c.worker == row.worker, alike)).values(person=stored))
    if invited:
        connection.execute(update(INVITE).where(INVITE.c.id == machine).values(person=person))
