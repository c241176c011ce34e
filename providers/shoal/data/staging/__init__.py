"""Stage data: write DataFrames, queries and other datasets once as Parquet, for all workers to read."""
