"""Compute which worker reads which rows, from the row counts in Parquet footers and without I/O."""
