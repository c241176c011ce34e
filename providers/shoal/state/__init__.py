"""The store that pools and jobs keep their rows in (SQLAlchemy, migrated by Alembic)."""

from __future__ import annotations

from shoal.state.home import home
from shoal.state.store import Store

__all__ = ["Store", "home"]
