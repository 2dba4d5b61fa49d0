"""Why a job does not advance, for programs: the dispatcher fills the columns in within a second."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0031"
down_revision: str | None = "0030"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("job", sa.Column("reason_code", sa.String(), nullable=True))
    op.add_column("job", sa.Column("missing_workers", sa.Integer(), nullable=False, server_default="0"))
    op.execute("UPDATE job SET reason_code = 'looking' WHERE reason LIKE 'Looking for workers %'")


def downgrade() -> None:
    op.drop_column("job", "missing_workers")
    op.drop_column("job", "reason_code")
