"""The public keys by which machines that joined prove who they are, and when their access ends.

Machines that joined with a secret have no key: they need a new invite.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0026"
down_revision: str | None = "0025"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("invite", sa.Column("public_key", sa.String(), nullable=True))
    op.add_column("invite", sa.Column("access_ends_ms", sa.BigInteger(), nullable=True))
    op.drop_column("invite", "key")
    op.execute("UPDATE invite SET gateway = 0")


def downgrade() -> None:
    op.add_column("invite", sa.Column("key", sa.String(), nullable=True))
    op.drop_column("invite", "access_ends_ms")
    op.drop_column("invite", "public_key")
