"""How many submissions were folded into counts; a timeline without them."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0015"
down_revision: str | None = "0014"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("job", sa.Column("folded", sa.Integer(), nullable=False, server_default="0"))
    op.drop_index("ix_event_telling", "event")
    telling = sa.text("type NOT IN ('version', 'folded')")
    op.create_index("ix_event_telling", "event", ["job_id", "id"], sqlite_where=telling)


def downgrade() -> None:
    op.drop_index("ix_event_telling", "event")
    op.create_index("ix_event_telling", "event", ["job_id", "id"], sqlite_where=sa.text("type != 'version'"))
    op.drop_column("job", "folded")
