"""Datasets: connectors, the row-group plan, ingestion. Loads Arrow only when something is read."""

from shoal.data.connector import DataConnector, ShardedDataConnector
from shoal.data.ingest import ArrowIngester, RayDataIngester

__all__ = ["ArrowIngester", "DataConnector", "RayDataIngester", "ShardedDataConnector"]
