"""How many updates were computed by a second machine as well, and how many of these were confirmed."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0027"
down_revision: str | None = "0026"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    for name in ("audited", "confirmed"):
        op.add_column("job", sa.Column(name, sa.Integer(), nullable=False, server_default="0"))


def downgrade() -> None:
    for name in ("confirmed", "audited"):
        op.drop_column("job", name)
