"""MLflow in the workers: calls of user code are recorded in the job's MLflow run."""
