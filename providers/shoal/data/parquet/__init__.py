"""Find Parquet files, open them, and read row ranges (rows of one row group)."""
