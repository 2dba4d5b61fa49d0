"""Why a job has the codecs that were chosen for it."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0006"
down_revision: str | None = "0005"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("job", sa.Column("chosen", sa.String(), nullable=True))


def downgrade() -> None:
    op.drop_column("job", "chosen")
