"""Datasets: connectors, the row-group plan and ingesters. Arrow is imported only when data is read."""

from shoal.data.connector import DataConnector, ShardedDataConnector
from shoal.data.ingest import ArrowIngester, RayDataIngester

__all__ = ["ArrowIngester", "DataConnector", "RayDataIngester", "ShardedDataConnector"]
