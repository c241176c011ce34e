"""Track a job's run in MLflow, register its model, and compare the model with the champion."""
