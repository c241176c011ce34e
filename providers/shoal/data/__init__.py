"""Describe datasets, assign their rows to workers and read them.

The classes in this package are the connectors (datasets that users pass to estimators) and the ingesters (readers of
rows). Arrow is imported only when data is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from shoal.data.connector import DataConnector, ShardedDataConnector
    from shoal.data.ingest import ArrowIngester, RayDataIngester

__all__ = ["ArrowIngester", "DataConnector", "RayDataIngester", "ShardedDataConnector"]

__getattr__ = lazy_exports(__name__)
