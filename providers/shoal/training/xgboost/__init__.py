"""Train XGBoost models on several workers: the code that runs in the driver and in the workers."""
