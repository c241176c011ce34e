"""Team to which a job belongs."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("team", sa.String(length=255), nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "team")
