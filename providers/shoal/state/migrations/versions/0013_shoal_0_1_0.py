"""The tables of shoal 0.1.0, from which later revisions upgrade. A new store gets its tables from `shoal.state.schema`."""

revision = "0013"
down_revision = None


def upgrade() -> None:
    """Do nothing: no store has an earlier revision."""
