"""The first tables."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0001"
down_revision: str | None = None
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.create_table(
        "idempotency_key",
        sa.Column("key", sa.String(length=255), nullable=False),
        sa.Column("fingerprint", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("created_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("key"),
    )
    op.create_table(
        "job",
        sa.Column("id", sa.String(length=8), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("queue", sa.String(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=True),
        sa.Column("error", sa.String(), nullable=True),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("rounds_total", sa.Integer(), nullable=False),
        sa.Column("created_ms", sa.BigInteger(), nullable=False),
        sa.Column("started_ms", sa.BigInteger(), nullable=True),
        sa.Column("finished_ms", sa.BigInteger(), nullable=True),
        sa.Column("updated_ms", sa.BigInteger(), nullable=False),
        sa.Column("purged_ms", sa.BigInteger(), nullable=True),
        sa.Column("token", sa.String(), nullable=True),
        sa.Column("incarnation", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("loss", sa.Float(), nullable=True),
        sa.Column("accuracy", sa.Float(), nullable=True),
        sa.Column("scored_version", sa.Integer(), nullable=True),
        sa.Column("best_version", sa.Integer(), nullable=True),
        sa.Column("best_accuracy", sa.Float(), nullable=True),
        sa.Column("durable_version", sa.Integer(), nullable=False),
        sa.Column("weights_sha256", sa.String(), nullable=True),
        sa.Column("parameters", sa.Integer(), nullable=True),
        sa.Column("samples_per_s", sa.Float(), nullable=False),
        sa.Column("reducer_host", sa.String(), nullable=True),
        sa.Column("reducer_pid", sa.Integer(), nullable=True),
        sa.Column("accepted", sa.Integer(), nullable=False),
        sa.Column("stale", sa.Integer(), nullable=False),
        sa.Column("duplicate", sa.Integer(), nullable=False),
        sa.Column("lease_lost", sa.Integer(), nullable=False),
        sa.Column("fenced", sa.Integer(), nullable=False),
        sa.Column("refused", sa.Integer(), nullable=False),
        sa.Column("reassigned", sa.Integer(), nullable=False),
        sa.Column("bytes_up", sa.BigInteger(), nullable=False),
        sa.Column("bytes_down", sa.BigInteger(), nullable=False),
        sa.Column("stream_id", sa.String(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("job", schema=None) as batch_op:
        batch_op.create_index("ix_job_newest", ["created_ms", "id"], unique=False)
        batch_op.create_index(batch_op.f("ix_job_queue"), ["queue"], unique=False)
        batch_op.create_index(batch_op.f("ix_job_status"), ["status"], unique=False)

    op.create_table(
        "outbox",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("payload", sa.JSON(), nullable=False),
        sa.Column("created_ms", sa.BigInteger(), nullable=False),
        sa.Column("due_ms", sa.BigInteger(), nullable=False),
        sa.Column("done_ms", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("outbox", schema=None) as batch_op:
        batch_op.create_index("ix_outbox_due", ["done_ms", "due_ms"], unique=False)
        batch_op.create_index(batch_op.f("ix_outbox_job_id"), ["job_id"], unique=False)

    op.create_table(
        "checkpoint",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("token", sa.String(), nullable=False),
        sa.Column("incarnation", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("voided", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "token"),
    )
    with op.batch_alter_table("checkpoint", schema=None) as batch_op:
        batch_op.create_index("ix_checkpoint_version", ["job_id", "version"], unique=False)

    op.create_table(
        "epoch_stat",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("reassigned", sa.Integer(), nullable=False),
        sa.Column("duplicates_refused", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "epoch"),
    )
    op.create_table(
        "event",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("stream_id", sa.String(), nullable=True),
        sa.Column("type", sa.String(), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("job_id", "stream_id"),
        sqlite_autoincrement=True,
    )
    with op.batch_alter_table("event", schema=None) as batch_op:
        batch_op.create_index("ix_event_job", ["job_id", "id"], unique=False)

    op.create_table(
        "ledger_entry",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("token", sa.String(), nullable=False),
        sa.Column("micro_batch", sa.Integer(), nullable=False),
        sa.Column("incarnation", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("worker", sa.String(), nullable=False),
        sa.Column("samples", sa.Integer(), nullable=False),
        sa.Column("voided", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "token", "micro_batch"),
        sqlite_with_rowid=False,
    )
    with op.batch_alter_table("ledger_entry", schema=None) as batch_op:
        batch_op.create_index("ix_ledger_epoch", ["job_id", "epoch", "micro_batch", "voided", "samples"], unique=False)

    op.create_table(
        "score",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("token", sa.String(), nullable=False),
        sa.Column("incarnation", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("loss", sa.Float(), nullable=True),
        sa.Column("accuracy", sa.Float(), nullable=False),
        sa.Column("samples", sa.Integer(), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("voided", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "token"),
    )
    with op.batch_alter_table("score", schema=None) as batch_op:
        batch_op.create_index("ix_score_version", ["job_id", "version"], unique=False)

    op.create_table(
        "seat",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("worker", sa.String(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("created_ms", sa.BigInteger(), nullable=False),
        sa.Column("ended_ms", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("seat", schema=None) as batch_op:
        batch_op.create_index("ix_seat_active", ["ended_ms", "job_id"], unique=False)
        batch_op.create_index(batch_op.f("ix_seat_job_id"), ["job_id"], unique=False)

    op.create_table(
        "submission",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("stream_id", sa.String(), nullable=False),
        sa.Column("worker", sa.String(), nullable=False),
        sa.Column("nonce", sa.String(), nullable=False),
        sa.Column("outcome", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=True),
        sa.Column("base", sa.String(), nullable=True),
        sa.Column("base_version", sa.Integer(), nullable=True),
        sa.Column("current", sa.String(), nullable=True),
        sa.Column("current_version", sa.Integer(), nullable=True),
        sa.Column("micro_batches", sa.JSON(), nullable=False),
        sa.Column("samples", sa.Integer(), nullable=False),
        sa.Column("bytes_up", sa.BigInteger(), nullable=False),
        sa.Column("bytes_down", sa.BigInteger(), nullable=False),
        sa.Column("waiting_s", sa.Float(), nullable=False),
        sa.Column("computing_s", sa.Float(), nullable=False),
        sa.Column("encoding_s", sa.Float(), nullable=False),
        sa.Column("uploading_s", sa.Float(), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("voided", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("job_id", "stream_id"),
        sqlite_autoincrement=True,
    )
    with op.batch_alter_table("submission", schema=None) as batch_op:
        batch_op.create_index("ix_submission_job", ["job_id"], unique=False)
        batch_op.create_index("ix_submission_nonce", ["job_id", "nonce"], unique=False)
        batch_op.create_index(
            "ix_submission_other",
            ["job_id", "outcome", "id"],
            unique=False,
            sqlite_where=sa.text("outcome != 'accepted'"),
        )

    op.create_table(
        "version",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("token", sa.String(), nullable=False),
        sa.Column("incarnation", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("loss", sa.Float(), nullable=True),
        sa.Column("sha256", sa.String(), nullable=True),
        sa.Column("samples", sa.Integer(), nullable=False),
        sa.Column("samples_per_s", sa.Float(), nullable=False),
        sa.Column("bytes_up", sa.BigInteger(), nullable=False),
        sa.Column("bytes_down", sa.BigInteger(), nullable=False),
        sa.Column("seconds", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("voided", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "token"),
    )
    with op.batch_alter_table("version", schema=None) as batch_op:
        batch_op.create_index("ix_version_series", ["job_id", "version"], unique=False)

    op.create_table(
        "worker_stat",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("worker", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("device", sa.String(), nullable=False),
        sa.Column("session", sa.String(), nullable=True),
        sa.Column("seat", sa.String(), nullable=True),
        sa.Column("joined_ms", sa.BigInteger(), nullable=True),
        sa.Column("left_ms", sa.BigInteger(), nullable=True),
        sa.Column("left_reason", sa.String(), nullable=True),
        sa.Column("seen_ms", sa.BigInteger(), nullable=False),
        sa.Column("samples", sa.Integer(), nullable=False),
        sa.Column("samples_per_s", sa.Float(), nullable=False),
        sa.Column("accepted", sa.Integer(), nullable=False),
        sa.Column("stale", sa.Integer(), nullable=False),
        sa.Column("duplicate", sa.Integer(), nullable=False),
        sa.Column("lease_lost", sa.Integer(), nullable=False),
        sa.Column("fenced", sa.Integer(), nullable=False),
        sa.Column("refused", sa.Integer(), nullable=False),
        sa.Column("refused_reason", sa.String(), nullable=True),
        sa.Column("unfit", sa.String(), nullable=True),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=True),
        sa.Column("bytes_up", sa.BigInteger(), nullable=False),
        sa.Column("bytes_down", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "worker"),
    )


def downgrade() -> None:
    op.drop_table("worker_stat")
    with op.batch_alter_table("version", schema=None) as batch_op:
        batch_op.drop_index("ix_version_series")

    op.drop_table("version")
    with op.batch_alter_table("submission", schema=None) as batch_op:
        batch_op.drop_index("ix_submission_other", sqlite_where=sa.text("outcome != 'accepted'"))
        batch_op.drop_index("ix_submission_nonce")
        batch_op.drop_index("ix_submission_job")

    op.drop_table("submission")
    with op.batch_alter_table("seat", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_seat_job_id"))
        batch_op.drop_index("ix_seat_active")

    op.drop_table("seat")
    with op.batch_alter_table("score", schema=None) as batch_op:
        batch_op.drop_index("ix_score_version")

    op.drop_table("score")
    with op.batch_alter_table("ledger_entry", schema=None) as batch_op:
        batch_op.drop_index("ix_ledger_epoch")

    op.drop_table("ledger_entry")
    with op.batch_alter_table("event", schema=None) as batch_op:
        batch_op.drop_index("ix_event_job")

    op.drop_table("event")
    op.drop_table("epoch_stat")
    with op.batch_alter_table("checkpoint", schema=None) as batch_op:
        batch_op.drop_index("ix_checkpoint_version")

    op.drop_table("checkpoint")
    with op.batch_alter_table("outbox", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_outbox_job_id"))
        batch_op.drop_index("ix_outbox_due")

    op.drop_table("outbox")
    with op.batch_alter_table("job", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_job_status"))
        batch_op.drop_index(batch_op.f("ix_job_queue"))
        batch_op.drop_index("ix_job_newest")

    op.drop_table("job")
    op.drop_table("idempotency_key")
