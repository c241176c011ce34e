"""A schema that a later version of shoal could have: today's, and one column more."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from shoal.state import databases

VERSION = "9001"

_ADDS_A_COLUMN = f'''"""Add a column."""

import sqlalchemy as sa
from alembic import op

revision = "{VERSION}"
down_revision = "{databases.SCHEMA_VERSION}"


def upgrade() -> None:
    with op.batch_alter_table("jobs") as jobs:
        jobs.add_column(sa.Column("added_later", sa.Text(), nullable=True))
'''


@pytest.fixture
def later_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let this process upgrade stores to the later schema; returns its version."""
    scripts = tmp_path / "migrations"
    shutil.copytree(databases.SCRIPTS, scripts, ignore=shutil.ignore_patterns("__pycache__"))
    (scripts / "versions" / f"{VERSION}_added_later.py").write_text(_ADDS_A_COLUMN)
    monkeypatch.setattr(databases, "SCRIPTS", scripts)
    monkeypatch.setattr(databases, "SCHEMA_VERSION", VERSION)
    return VERSION
