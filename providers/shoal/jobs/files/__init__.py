"""Read, write and remove the files of jobs: models, results, user code, staged data and logs."""
