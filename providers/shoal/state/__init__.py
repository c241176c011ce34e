"""The state store: database tables of pools and jobs (SQLAlchemy, migrated by Alembic)."""

from __future__ import annotations

from shoal.state.home import home
from shoal.state.store import Store

__all__ = ["Store", "home"]
