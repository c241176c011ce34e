"""Add the append-only record of actions: who changed a pool, a job or a model, when, and with which outcome."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "history",
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=True),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("kind", sa.String(length=20), nullable=False),
        sa.Column("pool", sa.String(255), nullable=True),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("operation_id", sa.String(255), nullable=True),
    )
    op.create_index("ix_history_pool", "history", ["pool"])
    op.create_index("ix_history_operation_id", "history", ["operation_id"])


def downgrade() -> None:
    op.drop_table("history")
