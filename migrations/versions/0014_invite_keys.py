"""What a machine that took up an invite can ask again by; a way to the samples of each worker."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0014"
down_revision: str | None = "0013"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("invite", sa.Column("key", sa.String(), nullable=True))
    op.create_index("ix_worker_stat_samples", "worker_stat", ["worker", "samples"])


def downgrade() -> None:
    op.drop_index("ix_worker_stat_samples", "worker_stat")
    op.drop_column("invite", "key")
