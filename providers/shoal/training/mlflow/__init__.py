"""Redirect the MLflow calls of user code to the job's MLflow run."""
