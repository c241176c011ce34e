"""Describe datasets, assign their rows to workers and read them.

The classes in this package are the connectors (datasets that users pass to estimators) and the ingesters (readers of
rows). Arrow is imported only when data is read.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.data.connector import DataConnector, ShardedDataConnector
    from shoal.data.ingest import ArrowIngester, RayDataIngester

# Public name -> the module from which the name is imported at its first use. If these modules were imported at once,
# Airflow would import all of them each time that it parses a DAG file with `import shoal.data`.
_HOMES = {
    "ArrowIngester": "shoal.data.ingest",
    "DataConnector": "shoal.data.connector",
    "RayDataIngester": "shoal.data.ingest",
    "ShardedDataConnector": "shoal.data.connector",
}

__all__ = ["ArrowIngester", "DataConnector", "RayDataIngester", "ShardedDataConnector"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
