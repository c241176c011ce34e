"""Find Parquet files, open them, and read row ranges."""
