"""Upgrade the store's tables to the schema of this shoal version with Alembic, and reject a newer schema."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection

from shoal.errors import StoreError
from shoal.state.database_errors import shown

SCHEMA_VERSION = "0001"
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


def too_new(url: str, version: str, known: str) -> StoreError:
    """Return the error for a store whose tables were changed by a newer version of shoal."""
    return StoreError(
        f"{shown(url)} was written by a newer shoal (its schema is {version}, this version supports {known}): upgrade "
        "shoal, or set SHOAL_HOME or SHOAL_STATE_URL to another store"
    )
