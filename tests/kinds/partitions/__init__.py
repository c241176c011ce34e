"""Tests of jobs that call a function for each partition of a dataset."""
