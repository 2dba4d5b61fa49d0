"""Scores of language models: a test loss in the job, and no accuracy."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0018"
down_revision: str | None = "0017"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_OF_VERSION = "(SELECT loss FROM score WHERE job_id = job.id AND version = job.{} AND NOT voided LIMIT 1)"


def upgrade() -> None:
    op.add_column("job", sa.Column("test_loss", sa.Float(), nullable=True))
    op.add_column("job", sa.Column("best_loss", sa.Float(), nullable=True))
    scored, best = _OF_VERSION.format("scored_version"), _OF_VERSION.format("best_version")
    op.execute(f"UPDATE job SET test_loss = {scored}, best_loss = {best}")
    with op.batch_alter_table("score") as batch_op:
        batch_op.alter_column("accuracy", existing_type=sa.Float(), nullable=True)


def downgrade() -> None:
    op.execute("DELETE FROM score WHERE accuracy IS NULL")
    with op.batch_alter_table("score") as batch_op:
        batch_op.alter_column("accuracy", existing_type=sa.Float(), nullable=False)
    op.drop_column("job", "best_loss")
    op.drop_column("job", "test_loss")
