"""Which workers hold which stages of a model."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0029"
down_revision: str | None = "0028"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("job", sa.Column("stages", sa.JSON(), nullable=True))


def downgrade() -> None:
    op.drop_column("job", "stages")
