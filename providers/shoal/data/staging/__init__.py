"""Write DataFrames, query results and other datasets to Parquet files (staging), which all workers then read."""
