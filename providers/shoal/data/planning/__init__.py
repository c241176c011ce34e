"""Assign the rows of a dataset to workers, using only the row counts from the Parquet footers."""
