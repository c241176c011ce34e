"""Read, write and remove the files of jobs: models, results, the user's code, staged data, logs."""
