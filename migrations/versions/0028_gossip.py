"""How far workers with weights of their own are from their mean, and who averaged with whom."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0028"
down_revision: str | None = "0027"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("version", sa.Column("consensus", sa.Float(), nullable=True))
    op.create_table(
        "exchange",
        sa.Column("job_id", sa.String(), sa.ForeignKey("job.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("worker", sa.String(), primary_key=True),
        sa.Column("peer", sa.String(), primary_key=True),
        sa.Column("count", sa.Integer(), nullable=False),
        sa.Column("distance", sa.Float(), nullable=True),
    )


def downgrade() -> None:
    op.drop_table("exchange")
    op.drop_column("version", "consensus")
