"""Whose each machine is: NULL is the control plane's owner, "" somebody whom the invite did not name."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0030"
down_revision: str | None = "0029"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None
TABLES = ("invite", "machine", "worker_stat")


def upgrade() -> None:
    for table in TABLES:
        op.add_column(table, sa.Column("person", sa.String(), nullable=True))
    invited = "SELECT id FROM invite WHERE gateway UNION SELECT subject FROM audit WHERE action = 'invite.use'"
    for table in TABLES[1:]:
        op.execute(f"UPDATE {table} SET person = '' WHERE substr(worker, 1, 8) IN ({invited})")


def downgrade() -> None:
    for table in TABLES:
        op.drop_column(table, "person")
