"""Nothing is left to deliver of kind `open`: the dispatcher publishes jobs by itself."""

from collections.abc import Sequence

from alembic import op

revision: str = "0017"
down_revision: str | None = "0016"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.execute("DELETE FROM outbox WHERE kind = 'open'")


def downgrade() -> None:
    """Nothing: the rows had no effect."""
