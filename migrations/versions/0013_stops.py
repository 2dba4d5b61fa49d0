"""For how long a job was stopped, when it goes on by itself; a way to its timeline past the versions."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0013"
down_revision: str | None = "0012"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("job", sa.Column("resume_ms", sa.BigInteger(), nullable=True))
    op.add_column("job", sa.Column("stopped_ms", sa.BigInteger(), nullable=False, server_default="0"))
    op.create_index("ix_event_telling", "event", ["job_id", "id"], sqlite_where=sa.text("type != 'version'"))


def downgrade() -> None:
    op.drop_index("ix_event_telling", "event")
    op.drop_column("job", "stopped_ms")
    op.drop_column("job", "resume_ms")
