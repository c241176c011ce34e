"""A further kind of job, which counts the rows of a dataset: the line of its registry is `REGISTERED`."""

REGISTERED = """
from shoal.jobs import kind
kind._KINDS["row_count"] = kind._Kind("tests.support.row_count", "CountSpec", "CountDriver", "CountCall")
"""
"""Content of a `sitecustomize.py`: all processes, also those of the pool, run it as if the line stood there."""
