"""A web page for pools, jobs and models. It is shown by `shoal ui`, and inside Airflow by the plugin."""

from __future__ import annotations

from importlib.util import find_spec

from shoal.errors import MissingExtraError

for _package in ("fastapi", "jinja2", "plotly", "uvicorn"):
    if find_spec(_package) is None:
        raise MissingExtraError(_package, "ui")
