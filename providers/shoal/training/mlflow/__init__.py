"""Make MLflow calls in user code use the job's MLflow run."""
