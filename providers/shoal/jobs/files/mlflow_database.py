"""The SQLite database in `$SHOAL_HOME` that MLflow uses if a job names no tracking server."""

from __future__ import annotations

from pathlib import Path

from shoal.state.home import subfolder


def default_database() -> Path:
    """Return the path of the database."""
    return subfolder("mlflow") / "mlflow.db"


def default_uri() -> str:
    """Return the tracking URI of the database."""
    return f"sqlite:///{default_database()}"
