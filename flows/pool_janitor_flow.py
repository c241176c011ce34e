"""Clean up after ended flow runs on all pools, and delete old versions of models and old jobs every night.

``python flows/pool_janitor_flow.py`` serves the flow `pool_janitor` every five minutes, and also as the deployment
`after-a-crash`, which automations run as soon as a run has crashed. It serves the flow `retention` every night. The
flows are in `shoal.prefect.janitor`.
"""

from __future__ import annotations

from shoal.prefect.janitor import pool_janitor as pool_janitor
from shoal.prefect.janitor import retention as retention
from shoal.prefect.janitor import serve_janitor

if __name__ == "__main__":
    serve_janitor()
