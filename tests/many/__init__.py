"""Tests of a function, or a model, per partition of a table."""
