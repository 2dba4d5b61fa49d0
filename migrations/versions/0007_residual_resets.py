"""How often error feedback began at zero in mid-job."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0007"
down_revision: str | None = "0006"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("job", sa.Column("residual_resets", sa.Integer(), nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("job", "residual_resets")
