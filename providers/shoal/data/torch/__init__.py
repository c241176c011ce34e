"""Read rows of Parquet files as tensors for PyTorch."""
