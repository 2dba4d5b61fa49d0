"""A recipe's own metrics."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0021"
down_revision: str | None = "0020"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("job", sa.Column("own_metrics", sa.JSON(none_as_null=True), nullable=True))
    op.add_column("score", sa.Column("own_metrics", sa.JSON(none_as_null=True), nullable=True))


def downgrade() -> None:
    op.drop_column("score", "own_metrics")
    op.drop_column("job", "own_metrics")
