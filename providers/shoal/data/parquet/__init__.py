"""Find Parquet files, open them, and read row ranges (consecutive rows of one row group)."""
