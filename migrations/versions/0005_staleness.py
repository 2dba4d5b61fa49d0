"""How late each counted update was, where a strategy counts late ones."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0005"
down_revision: str | None = "0004"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("ledger_entry", sa.Column("staleness", sa.Integer(), nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("ledger_entry", "staleness")
