"""Workers that were seen, drained and removed; seats whose workers are asked to leave."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0012"
down_revision: str | None = "0011"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("seat", sa.Column("leaving_ms", sa.BigInteger(), nullable=True))
    op.add_column("seat", sa.Column("left_to", sa.String(), nullable=True))
    op.create_table(
        "machine",
        sa.Column("worker", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("host", sa.String(), nullable=False),
        sa.Column("device", sa.String(), nullable=False),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("versions", sa.JSON(), nullable=False),
        sa.Column("queues", sa.JSON(), nullable=False),
        sa.Column("first_seen_ms", sa.BigInteger(), nullable=False),
        sa.Column("began_ms", sa.BigInteger(), nullable=False),
        sa.Column("last_seen_ms", sa.BigInteger(), nullable=False),
        sa.Column("noted_ms", sa.BigInteger(), nullable=False),
        sa.Column("drained_ms", sa.BigInteger(), nullable=True),
        sa.Column("dismissed_ms", sa.BigInteger(), nullable=True),
        sa.Column("tallies", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("worker"),
    )


def downgrade() -> None:
    op.drop_table("machine")
    op.drop_column("seat", "left_to")
    op.drop_column("seat", "leaving_ms")
