"""When a job was paused."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0002"
down_revision: str | None = "0001"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("job", sa.Column("paused_ms", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    op.drop_column("job", "paused_ms")  # in place: a table made anew would take with it all rows that refer to it
