"""Describe datasets, assign their rows to workers and read them.

The classes in this package are the connectors (datasets that users pass to estimators) and the ingesters (readers of
rows). Arrow is imported only when data is read.
"""

from shoal.data.connector import DataConnector, ShardedDataConnector
from shoal.data.ingest import ArrowIngester, RayDataIngester

__all__ = ["ArrowIngester", "DataConnector", "RayDataIngester", "ShardedDataConnector"]
