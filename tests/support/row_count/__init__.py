"""A further kind of job, which counts the rows of a dataset."""
