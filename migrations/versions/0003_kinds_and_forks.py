"""What kind of machine computed, and what a job was forked from."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0003"
down_revision: str | None = "0002"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

COLUMNS = (("job", "reducer_kind"), ("job", "forked_from"), ("worker_stat", "kinds"))


def upgrade() -> None:
    for table, column in COLUMNS:
        op.add_column(table, sa.Column(column, sa.JSON(none_as_null=True), nullable=True))


def downgrade() -> None:
    for table, column in COLUMNS:
        op.drop_column(table, column)  # in place: a table made anew would take with it all rows that refer to it
