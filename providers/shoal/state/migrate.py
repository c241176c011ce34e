"""Runs the Alembic migrations on a connection."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection

SCRIPTS = Path(__file__).with_name("migrations")
"""Alembic's folder of revisions."""


def upgrade(connection: Connection) -> None:
    """Bring the database to the newest schema, within the caller's transaction: all of it or nothing."""
    config = Config()
    config.set_main_option("script_location", str(SCRIPTS))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
