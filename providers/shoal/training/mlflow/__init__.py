"""Record the MLflow calls of user code in the workers in the job's MLflow run."""
