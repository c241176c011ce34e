"""Files of jobs: models, results, the user's code, staged data, logs."""
