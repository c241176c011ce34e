"""What a job does with MLflow: its run, its model, champion and challenger."""
