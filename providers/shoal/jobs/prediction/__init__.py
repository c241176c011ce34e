"""Predict all rows of a dataset with a model from MLflow (batch prediction), and write the predictions as Parquet."""
