"""What runs inside the pool: the gang of workers, XGBoost's tracker, the engines, prediction. Knows nothing of jobs."""
