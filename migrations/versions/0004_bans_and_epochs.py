"""Strikes and bans of workers; an epoch's samples counted while its versions are projected."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0004"
down_revision: str | None = "0003"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

COUNT = """
INSERT INTO epoch_stat (job_id, epoch, reassigned, duplicates_refused, counted, covered)
SELECT job_id, epoch, 0, 0, SUM(samples * times), SUM(samples) FROM (
  SELECT job_id, epoch, micro_batch, MAX(samples) AS samples, COUNT(*) AS times
  FROM ledger_entry WHERE NOT voided GROUP BY job_id, epoch, micro_batch
) GROUP BY job_id, epoch
ON CONFLICT (job_id, epoch) DO UPDATE SET counted = excluded.counted, covered = excluded.covered
"""


def upgrade() -> None:
    op.add_column("worker_stat", sa.Column("strikes", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("worker_stat", sa.Column("banned", sa.String(), nullable=True))
    for name in ("counted", "covered"):
        op.add_column("epoch_stat", sa.Column(name, sa.Integer(), nullable=False, server_default="0"))
    op.execute(COUNT)


def downgrade() -> None:
    for table, names in (("epoch_stat", ("covered", "counted")), ("worker_stat", ("banned", "strikes"))):
        for name in names:
            op.drop_column(table, name)
