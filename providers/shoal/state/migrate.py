"""Upgrade the store's tables to the schema of this shoal version with Alembic."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection

SCHEMA_VERSION = "0010"
"""Newest revision in `migrations/versions`."""

SCRIPTS = Path(__file__).with_name("migrations")
"""Folder with the Alembic revisions."""


def upgrade(connection: Connection) -> None:
    """Upgrade the database to the newest schema.

    All changes are made in the caller's transaction. If one change fails, no change is made.
    """
    # Import Alembic only here, because the import takes 0.3 s, and a store with the newest schema needs no migration.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(SCRIPTS))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
