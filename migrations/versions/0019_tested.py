"""Scores on the test set of a job with a validation split."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0019"
down_revision: str | None = "0018"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("job", sa.Column("tested", sa.JSON(none_as_null=True), nullable=True))
    op.add_column("job", sa.Column("tested_last", sa.JSON(none_as_null=True), nullable=True))
    op.add_column("score", sa.Column("tested", sa.JSON(none_as_null=True), nullable=True))


def downgrade() -> None:
    op.drop_column("score", "tested")
    op.drop_column("job", "tested_last")
    op.drop_column("job", "tested")
