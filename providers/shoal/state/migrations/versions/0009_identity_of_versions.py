"""Promotions with the identity of their versions, and the place of a withdrawal among the promotions."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

_COLUMNS = (("version_identity", sa.JSON()), ("previous_identity", sa.JSON()), ("withdrawn_after", sa.Integer()))


def upgrade() -> None:
    for name, type_ in _COLUMNS:
        op.add_column("promotions", sa.Column(name, type_, nullable=True))


def downgrade() -> None:
    for name, _ in _COLUMNS:
        op.drop_column("promotions", name)
