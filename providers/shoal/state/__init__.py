"""The state store: the database with the tables of pools and jobs.

The tables are defined with SQLAlchemy. Alembic changes the tables of an existing database for a new version of shoal.
"""

from __future__ import annotations

from shoal.state.home import home
from shoal.state.store import Store

__all__ = ["Store", "home"]
