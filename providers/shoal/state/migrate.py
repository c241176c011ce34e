"""Run the Alembic migrations on a connection."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection

SCRIPTS = Path(__file__).with_name("migrations")
"""Folder with the Alembic revisions."""


def upgrade(connection: Connection) -> None:
    """Upgrade the database to the newest schema inside the caller's transaction, so that all or nothing is changed."""
    config = Config()
    config.set_main_option("script_location", str(SCRIPTS))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
