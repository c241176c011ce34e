"""Run the Alembic migrations (the scripts that change the store's tables for a new version) on a connection."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection

SCRIPTS = Path(__file__).with_name("migrations")
"""Folder with the Alembic revisions."""


def upgrade(connection: Connection) -> None:
    """Upgrade the database to the newest schema.

    All changes are made in the caller's transaction. So if one of them fails, nothing is changed.
    """
    config = Config()
    config.set_main_option("script_location", str(SCRIPTS))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
