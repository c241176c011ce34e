"""Parquet files: found, opened, and read by row ranges."""
