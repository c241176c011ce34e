"""Data that is no Parquet yet, written as Parquet once for all workers."""
