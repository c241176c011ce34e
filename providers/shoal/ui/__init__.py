"""The web page about pools, jobs and models. The command `shoal ui` and the Airflow plugin serve this page."""

from __future__ import annotations

from importlib.util import find_spec

from shoal.errors import MissingExtraError

for _package in ("fastapi", "jinja2", "plotly", "uvicorn"):
    if find_spec(_package) is None:
        raise MissingExtraError(_package, "ui")
