"""Rows of Parquet as tensors for PyTorch."""
