"""Batch prediction: predict the rows of a dataset with a model of the MLflow registry, and write them as Parquet."""
